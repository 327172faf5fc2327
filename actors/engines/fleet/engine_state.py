"""One engine of a fleet from its building to its end."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import structlog

from actors.engines.announced_version import Published
from actors.engines.base import Engine, Generation, Scores, SharesServer, TakesPublished
from bus.errors import EngineError
from bus.images import PlacedImage
from bus.waiting import bounded, unless

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HostWeights:
    """One policy version in whole, and what is new in it. All engines share these tensors; nobody writes to
    them. A version costs what changed since the last."""

    serial: int = 0
    """Counts the updates: versions may come again when a learner resumes. 0 is before the first."""
    policy_version: int = -1
    full: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """All tensors, by Hugging Face name."""
    changed: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """Tensors that differ from the update before."""
    published: Published | None = None
    """An announcement in place of the tensors: each engine has the learner send them."""

    def followed_by(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> "HostWeights":
        """Return the next update; `state` holds all tensors, or those that changed since this one."""
        full = {**self.full, **state}
        return HostWeights(self.serial + 1, policy_version, full=full, changed=state)

    def followed_by_published(self, published: Published) -> "HostWeights":
        """Return the next update, of which only the announcement is here."""
        return HostWeights(self.serial + 1, published.policy_version, published=published)

    async def load_into(self, engine: Engine, serial: int) -> float:
        """Update an engine that has the update `serial`; return the seconds generation stood still."""
        if self.published is None:
            return await engine.load_weights(self.since(serial), self.policy_version)
        if not isinstance(engine, TakesPublished):
            raise TypeError(f"{type(engine).__name__} takes weights from its host only")
        return await engine.load_published(self.published)

    def are_in(self, engine: Engine) -> bool:
        """Return whether the engine says so; what the learner sent it may be of a later version."""
        later = self.published is not None and engine.policy_version > self.policy_version
        return later or engine.policy_version == self.policy_version

    def since(self, serial: int) -> Mapping[str, "torch.Tensor"]:
        return self.changed if serial == self.serial - 1 and serial > 0 else self.full


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
    """Requests whose callers are gone, until the engine has aborted them."""
    update: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine was closed: nothing comes from it any more."""

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
