"""Texts that end an answer: engines know only tokens, so it comes in pieces and is cut where one stands."""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from actors.engines.base import Generation, GenerationRequest
from actors.engines.continued_generation import joined, next_piece
from bus.errors import RequestRefusedError

FIRST_PIECE = 64
"""Tokens of the first piece; each further one is as long as all before, so that half at most is in vain."""


async def generate_until(
    generate: Callable[[GenerationRequest], Awaitable[Generation]], request: GenerationRequest,
    find_end: Callable[[Sequence[int]], Awaitable[int | None]], *, begun: Generation | None = None,
) -> Generation:  # fmt: skip
    """Continue `request` until `find_end`, given the tokens so far, says after how many of them to end. What
    is cut off was sampled later, so what is left is a sample of the policy, as if it had stopped there.
    `begun` is what was sampled for it before."""
    limit, whole = request.sampling.max_new_tokens, begun
    while True:
        sampled = 0 if whole is None else len(whole.token_ids)
        tokens = min(max(FIRST_PIECE, sampled), limit - sampled)
        try:
            piece = await generate(_piece(request, whole, tokens))
        except RequestRefusedError:
            if whole is None:
                raise
            return whole  # the context is full, and the last piece ended as `length`
        whole = piece if whole is None else joined([whole, piece])
        end = await find_end(whole.token_ids.tolist())
        if end is not None:
            return _cut(whole, end, len(request.token_ids), request.experts_from)
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


def _piece(request: GenerationRequest, whole: Generation | None, tokens: int) -> GenerationRequest:
    if whole is None:
        return replace(request, sampling=replace(request.sampling, max_new_tokens=tokens))
    return next_piece(request, whole, tokens)


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
        None if generation.kv_versions is None else generation.kv_versions[:tokens],
    )
