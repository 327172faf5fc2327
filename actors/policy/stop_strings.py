"""Texts that end an answer: engines know only tokens, so it comes in pieces and is cut where one stands."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from actors.engines.base import Generation, GenerationRequest, joined_kept_sets
from bus.errors import RequestRefusedError

FIRST_PIECE = 64
"""Tokens of the first piece; each further one is as long as all before, so that half at most is in vain."""


async def generate_until(
    generate: Callable[[GenerationRequest], Awaitable[Generation]], request: GenerationRequest,
    find_end: Callable[[Sequence[int]], Awaitable[int | None]],
) -> Generation:  # fmt: skip
    """Continue `request` until `find_end`, given the tokens so far, says after how many of them to end.

    What is cut off was sampled later, so what is left is a sample of the policy, as if it had stopped there.
    """
    prompt, limit = list(request.token_ids), request.sampling.max_new_tokens
    whole: Generation | None = None
    while True:
        sampled = 0 if whole is None else len(whole.token_ids)
        next_piece = _piece(request, prompt, whole, min(max(FIRST_PIECE, sampled), limit - sampled))
        try:
            piece = await generate(next_piece)
        except RequestRefusedError:
            if whole is None:
                raise
            return whole  # the context is full, and the last piece ended as `length`
        whole = piece if whole is None else _joined(whole, piece)
        end = await find_end(whole.token_ids.tolist())
        if end is not None:
            return _cut(whole, end, len(prompt), request.experts_from)
        if piece.finish_reason != "length" or len(whole.token_ids) >= limit or not len(piece.token_ids):
            return whole


def first_end(
    token_ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return the number of tokens whose text first holds one of `stops`; None where none does."""

    def holds(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(stop in text for stop in stops)

    if not holds(len(token_ids)):
        return None
    return bisect_left(range(len(token_ids)), True, key=holds)


def _piece(
    request: GenerationRequest, prompt: list[int], whole: Generation | None, tokens: int
) -> GenerationRequest:
    """Return what is asked for next."""
    sampling = replace(request.sampling, max_new_tokens=tokens)
    if whole is None:
        return replace(request, sampling=sampling)
    sampled = len(whole.token_ids)
    seed = None if sampling.seed is None else (sampling.seed + sampled) % (1 << 63)
    routed = 0 if whole.routed_experts is None else len(whole.routed_experts)
    return replace(
        request,
        request_id=f"{request.request_id}-{sampled}",
        token_ids=[*prompt, *whole.token_ids.tolist()],
        sampling=replace(sampling, seed=seed),
        experts_from=None if request.experts_from is None else request.experts_from + routed,
    )


def _joined(one: Generation, other: Generation) -> Generation:
    routed = [part.routed_experts for part in (one, other) if part.routed_experts is not None]
    return Generation(
        np.concatenate([one.token_ids, other.token_ids]),
        np.concatenate([one.logprobs, other.logprobs]),
        np.concatenate([one.policy_versions, other.policy_versions]),
        other.finish_reason,
        np.concatenate(routed) if routed else None,
        joined_kept_sets((one, other)),
    )


def _cut(generation: Generation, tokens: int, prompt: int, experts_from: int | None) -> Generation:
    """Return the first `tokens` of a generation; of experts, those of all tokens but the last."""
    routed = generation.routed_experts
    if routed is not None and experts_from is not None:
        routed = routed[: prompt + tokens - 1 - experts_from]
    return Generation(
        generation.token_ids[:tokens],
        generation.logprobs[:tokens],
        generation.policy_versions[:tokens],
        "stop",
        routed,
        None if generation.kept is None else generation.kept.first(tokens),
    )
