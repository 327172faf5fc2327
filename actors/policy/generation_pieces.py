"""A generation that comes in pieces: what is asked for next, and the pieces as one."""

from dataclasses import replace

import numpy as np

from actors.engines.base import Generation, GenerationRequest, joined_kept_sets


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


def joined(one: Generation, other: Generation) -> Generation:
    """Return two pieces that follow one another as one, which ended as the second did."""
    routed = [part.routed_experts for part in (one, other) if part.routed_experts is not None]
    return Generation(
        np.concatenate([one.token_ids, other.token_ids]),
        np.concatenate([one.logprobs, other.logprobs]),
        np.concatenate([one.policy_versions, other.policy_versions]),
        other.finish_reason,
        np.concatenate(routed) if routed else None,
        joined_kept_sets((one, other)),
    )
