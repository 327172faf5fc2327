"""One request on its way through the fleet: its tokens so far, from however many engines."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import structlog

from actors.engines.base import NOTHING, Generation, GenerationRequest, InterruptedGenerationError
from actors.engines.continued_generation import joined, next_piece
from bus.errors import EngineError
from bus.trajectory import LARGEST_LOGPROB, SMALLEST_LOGPROB, FinishReason

if TYPE_CHECKING:
    from actors.engines.fleet.member import Member

log = structlog.get_logger()


@dataclass(eq=False)
class PendingRequest:
    """A request, and the pieces of its generation."""

    number: int
    """Orders the requests: the oldest waiting one goes first, interrupted ones too."""
    request: GenerationRequest
    pieces: list[Generation] = field(default_factory=list)
    place: "asyncio.Future[None] | None" = None
    """A future that is done when the request has a place, or needs none any more."""
    member: "Member | None" = None
    attempt_id: str | None = None
    refusals: dict[str, Exception] = field(default_factory=dict)
    """The errors of the engines that can never serve it, by the names of their members."""
    errors: int = 0
    """Times that it failed at engines that went on."""
    failures: int = 0
    """Engines that failed under it, whatever they failed of."""
    alone: bool = False
    """Whether the latest engine that failed had no other request."""
    aborted: bool = False
    """The caller wants what there is."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why the request has ended; None when it has not. An engine that died may have sampled the
        last token, so tokens say it where an engine cannot."""
        last = self.pieces[-1] if self.pieces else NOTHING
        sampling = self.request.sampling
        if last.finish_reason != "abort":
            return last.finish_reason
        if len(last.token_ids) and int(last.token_ids[-1]) in sampling.stop_token_ids:
            return "stop"
        if self.sampled >= max(1, sampling.max_new_tokens):
            return "length"
        return "abort" if self.aborted else None

    @property
    def faults(self) -> int:
        """Failures that can be no other request's fault, once one of them is certain not to be."""
        return self.errors + (self.failures if self.alone else 0)

    @property
    def sampled(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [L], the prompt and what was sampled."""
        if not self.pieces:
            return self._prompt
        return np.concatenate([self._prompt, *(piece.token_ids for piece in self.pieces)])

    @property
    def beginning(self) -> np.ndarray:
        """int32 [L], what two requests have in common that begin alike: `tokens`, and numbers below 0 that
        tell images apart in place of the tokens that stand for them."""
        if not self.request.images:
            return self.tokens
        found = self.tokens.copy()
        for image in self.request.images:
            found[image.start : image.stop] = -1 - int(image.digest[:7], 16)
        return found

    @cached_property
    def _prompt(self) -> np.ndarray:
        return np.asarray(self.request.token_ids, np.int32)

    def rest(self, request_id: str) -> GenerationRequest:
        """Return what is left to do, as a request of its own: the budget shrinks by what was sampled. It asks
        for experts from the first token on whose experts are not known. An engine that failed has reported
        none, and the next one routes its tokens again."""
        if not self.pieces:
            return replace(self.request, request_id=request_id)
        left = self.request.sampling.max_new_tokens - self.sampled
        return replace(next_piece(self.request, self.generation(), left), request_id=request_id)

    def generation(self) -> Generation:
        return replace(joined(self.pieces), finish_reason=self.finish_reason or "abort")


def left_of(request: GenerationRequest, error: EngineError) -> Generation:
    """Return what is known of the tokens of a request that failed."""
    if not isinstance(error, InterruptedGenerationError):
        return NOTHING
    try:
        return sound(request, error.partial)
    except EngineError as unsound:
        log.warning("tokens_not_kept", reason=str(unsound))
        return NOTHING


def sound(request: GenerationRequest, generation: Generation) -> Generation:
    """Raise EngineError for a generation that is none."""
    lengths = [len(generation.token_ids), len(generation.logprobs), len(generation.policy_versions)]
    if generation.kv_versions is not None:
        lengths.append(len(generation.kv_versions))
    if len(set(lengths)) > 1 or lengths[0] > request.sampling.max_new_tokens:
        raise EngineError(
            f"{request.request_id}: {lengths} tokens, log-probs and versions, where "
            f"{request.sampling.max_new_tokens} at most were asked for"
        )
    least, most = SMALLEST_LOGPROB, LARGEST_LOGPROB
    within = (generation.logprobs >= least) & (generation.logprobs <= most)  # NaN is not
    if not within.all():
        raise EngineError(
            f"{request.request_id}: a log-prob is {generation.logprobs[~within][0]}, but no engine can have "
            f"drawn a token outside of {least:g} to 0 nats"
        )
    if (generation.token_ids < 0).any():
        raise EngineError(f"{request.request_id}: a token id is {generation.token_ids.min()}")
    ends = np.flatnonzero(np.isin(generation.token_ids[:-1], request.sampling.stop_token_ids))
    if len(ends):
        raise EngineError(
            f"{request.request_id}: the answer goes on behind token {ends[0]} of {lengths[0]}, "
            f"{generation.token_ids[ends[0]]}, by which it was to end: does the engine ignore stop tokens?"
        )
    return generation
