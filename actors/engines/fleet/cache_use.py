"""How much room an engine's cache has for contexts, by what the engine tells now and then."""

from collections.abc import Callable, Iterable

from actors.engines.base import Engine, KvTokens, TellsKvTokens
from actors.engines.fleet.pending_request import PendingRequest

RECENT = 64
"""Requests over which the length of answers is averaged."""


class CacheUse:
    """Counts what an engine holds, with requests that it has not counted yet. A request is expected to need
    its tokens so far and an answer as long as recent ones."""

    def __init__(self, engine: Callable[[], Engine | None], *, hard_share: float) -> None:
        self._engine = engine
        self._hard_share = hard_share
        self._held: dict[PendingRequest, int] = {}
        self._held_tokens = 0
        self._reading = 0
        self._sent_since = 0
        """Tokens of the requests that were sent after the newest reading."""
        self._answer_tokens: float | None = None

    @property
    def kv_tokens(self) -> KvTokens | None:
        """Return how full the cache is; None if the engine does not tell."""
        engine = self._engine()
        told = engine.kv_tokens if isinstance(engine, TellsKvTokens) else None
        if told is None:
            return None
        if not told.reading:  # no reading: the engine counts each request from its arrival
            return told._replace(used=max(told.used, self._held_tokens))
        if told.reading != self._reading:
            self._reading, self._sent_since = told.reading, 0
        return told._replace(used=told.used + self._sent_since)

    def takes(self, pending: PendingRequest) -> bool:
        """Return whether there is room for a request; one that is alone has it anyway."""
        if not self._held:
            return True
        kv = self.kv_tokens
        return kv is None or kv.used + self._need(pending) <= self._hard_share * kv.capacity

    def add(self, pending: PendingRequest) -> None:
        need = self._held[pending] = self._need(pending)
        self._held_tokens += need
        self._sent_since += need

    def remove(self, pending: PendingRequest) -> None:
        self._held_tokens -= self._held.pop(pending, 0)
        if pending.pieces:
            sampled = len(pending.pieces[-1].token_ids)
            before = sampled if self._answer_tokens is None else self._answer_tokens
            self._answer_tokens = before + (sampled - before) / RECENT

    def _need(self, pending: PendingRequest) -> int:
        left = pending.request.sampling.max_new_tokens - pending.sampled
        answer = left if self._answer_tokens is None else min(left, self._answer_tokens)
        return len(pending.request.token_ids) + pending.sampled + int(answer)


def total_of(told: Iterable[KvTokens | None]) -> KvTokens | None:
    """Return how full several caches are together; None unless all of them tell."""
    known = list(told)
    found = [kv for kv in known if kv is not None]
    if not found or len(found) < len(known):
        return None
    return KvTokens(
        sum(kv.used for kv in found),
        sum(kv.capacity for kv in found),
        shares_prefixes=all(kv.shares_prefixes for kv in found),
    )
