"""One engine of a fleet from its building to its end."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from actors.engines.base import Engine, Generation, Scores, SharesServer
from actors.engines.fleet.host_weights import HostWeights
from bus.errors import EngineError
from bus.images import PlacedImage
from bus.waiting import bounded, unless

log = structlog.get_logger()


class ScoredTokens(NamedTuple):
    """Log-probs of given tokens, as the weights of one version have them."""

    policy_version: int
    logprobs: list[list[float]]


@dataclass(eq=False)
class EngineState:
    """State of an engine; the next engine of the same place in the fleet gets a new one."""

    engine: Engine
    serial: int = 0
    """The update it has; 0 for the weights that it came with."""
    errors: int = 0
    """Requests that failed in a row."""
    failed_under: int | None = None
    """Requests that it may have failed of; None when it has not failed."""
    ending: set[asyncio.Task[Generation]] = field(default_factory=set)
    """Requests whose callers are gone, until it has aborted them."""
    update: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was closed: nothing comes from it any more."""

    def suspects(self, asked: int) -> int:
        """Return the number of requests of which it may have failed: of the `asked` ones, of those that it
        has yet to abort, and of those for others at its server."""
        others = self.engine.requests_of_others if isinstance(self.engine, SharesServer) else 0
        return asked + len(self.ending) + others

    async def load(self, weights: HostWeights, *, name: str, timeout_s: float) -> float:
        """Load these weights; return the seconds generation stood still. Raises `EngineError`, which has the
        engine's `name`, and as the engine does."""
        loading = weights.load_into(self.engine, self.serial)
        async with bounded(timeout_s, f"{name} did not load its weights"):
            seconds = await unless(self.gone, loading)
        if not weights.are_in(self.engine):
            raise EngineError(
                f"{name} says it has version {self.engine.policy_version} "
                f"after version {weights.policy_version} was loaded"
            )
        self.serial = weights.serial
        return seconds or 0.0

    async def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[PlacedImage]], *,
        name: str, timeout_s: float,
    ) -> list[list[float]] | None:  # fmt: skip
        """Return what the engine says of these tokens; None when it cannot tell, or is closed."""
        if not isinstance(self.engine, Scores):
            return None
        try:
            async with bounded(timeout_s, f"{name} did not score the probe"):
                return await unless(self.gone, self.engine.score(sequences, images))
        except EngineError as error:
            log.warning("probe_not_scored", engine=name, reason=str(error))
            return None
