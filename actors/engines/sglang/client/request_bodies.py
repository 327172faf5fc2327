"""What SGLang's /generate is asked, in its own words."""

import uuid
from collections.abc import Sequence
from typing import Any

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.sglang.client.sent_images import image_fields
from bus.config import MOST_KEPT
from bus.images import PlacedImage

Json = dict[str, Any]


def probe_body() -> Json:
    probe = GenerationRequest("probe", (1,), Sampling(temperature=0.0, max_new_tokens=1), experts_from=0)
    return request_body(probe, rid=f"probe-{uuid.uuid4().hex}", salt="probe")


def score_request(token_ids: Sequence[int], images: Sequence[PlacedImage]) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, max_new_tokens=1)
    return GenerationRequest("score", tuple(token_ids), sampling, images=tuple(images))


def request_body(request: GenerationRequest, *, rid: str, salt: str, adapter: str = "") -> Json:
    """Return what /generate wants for a request, which an adapter of that name is to answer, if any. Its
    images are as `SentImages.prepared` has made them."""
    sampling = request.sampling
    stops = list(sampling.stop_token_ids)
    most_kept = min(sampling.top_k or MOST_KEPT, MOST_KEPT) if sampling.records_kept else sampling.top_k
    routed = {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
    return {
        "rid": rid,
        **image_fields(request, salt),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": most_kept or -1,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": stops or None,
            "ignore_eos": not stops,
            "sampling_seed": sampling.seed,  # a deterministic server would give all without one the same
        },
        "priority": request.lease_version,  # counts where the server has enable_priority_scheduling
        "return_logprob": True,
        "extra_key": salt,
        **({"lora_path": adapter} if adapter else {}),
        **({"return_sampling_mask": True} if sampling.records_kept else {}),
        **(routed if request.experts_from is not None else {}),
    }
