"""A generation that comes in pieces: what is asked for next, and the pieces as one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actors.engines.base import NOTHING, Generation, GenerationRequest
from bus.kept_sets import KeptSets
from bus.older_kv import joined_kv_versions


def next_piece(request: GenerationRequest, begun: Generation, tokens: int) -> GenerationRequest:
    """Return the request of so many tokens after those that were sampled for `request` already."""
    sampling, sampled = request.sampling, len(begun.token_ids)
    seed = None if sampling.seed is None else (sampling.seed + sampled) % (1 << 63)
    routed = 0 if begun.routed_experts is None else len(begun.routed_experts)
    return replace(
        request,
        request_id=f"{request.request_id}-{sampled}",
        token_ids=[*request.token_ids, *begun.token_ids.tolist()],
        sampling=replace(sampling, max_new_tokens=tokens, seed=seed),
        experts_from=None if request.experts_from is None else request.experts_from + routed,
    )


def joined(parts: Sequence[Generation]) -> Generation:
    """Return generations that follow one another as one, which ended as the last one did."""
    if not parts:
        return NOTHING
    routed = [part.routed_experts for part in parts if part.routed_experts is not None]
    return Generation(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        finish_reason=parts[-1].finish_reason,
        routed_experts=np.concatenate(routed) if routed else None,
        kept=_joined_kept_sets(parts),
        kv_versions=joined_kv_versions([(part.kv_versions, part.policy_versions) for part in parts]),
    )


def _joined_kept_sets(parts: Sequence[Generation]) -> KeptSets | None:
    """Return the kept sets of generations that follow one another; None where none of them has any."""
    if all(part.kept is None for part in parts):
        return None
    return KeptSets.joined(
        [KeptSets.none(len(part.token_ids)) if part.kept is None else part.kept for part in parts]
    )
