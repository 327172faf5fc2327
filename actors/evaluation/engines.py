"""Engines that answer held-out prompts: engines of their own, or those that roll out."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from actors.engines.base import Engine
from actors.engines.fleet.fleet import Fleet
from actors.weights.follow import PolicyFollower, fetch_state
from bus.connection import Bus
from bus.errors import BusError, EngineError, EngineLostError, HandBackError
from bus.messages import PolicyManifest
from storage.weights.blob_sources import BlobSource

log = structlog.get_logger()
PATIENCE_S = 120.0
"""Seconds that an evaluation waits for weights; another actor may have them sooner."""
LOOK_S = 1.0
"""Seconds between two checks whether this actor is to end and whether the learner still waits."""


class EvaluationEngines(Protocol):
    """The engines that answer an evaluator's prompts."""

    prompts_at_once: int | None
    """Number of prompts in progress at a time; None for all."""
    finishes_begun: bool
    """Whether prompts that were begun have as much time as rollouts when this process is to end; otherwise
    they are given up at once. An unfinished evaluation goes to another actor in both cases."""
    exact: bool
    """Whether exactly the version asked for samples all tokens; otherwise later versions may."""

    @property
    def serves(self) -> bool:
        """Return whether an engine answers at the moment."""

    async def with_weights(self, policy: PolicyManifest, stop: asyncio.Event) -> Engine | None:
        """Return an engine with these weights or with later ones of the same learner.

        Returns None when that learner is gone, since nobody waits for the answer. Raises `BusError` or
        `StorageError` when the weights are gone, `HandBackError` when another actor may be sooner, and
        `EngineError` when no actor seems to be able to load them."""

    async def after_loss(self, policy: PolicyManifest, error: EngineLostError) -> EngineError | HandBackError:
        """Return what an evaluation of `policy` raises, in the midst of which no engine was left."""

    async def close(self) -> None:
        """Close what was started for evaluations."""


class OwnEngine:
    """An engine that has exactly the version asked for. `start` or the first evaluation starts it."""

    prompts_at_once: int | None = None
    finishes_begun = False
    exact = True

    def __init__(self, build: Callable[[], Engine], blobs: BlobSource) -> None:
        self._build = build
        self._blobs = blobs
        self._engine: Engine | None = None
        self._has: tuple[str, int] | None = None
        """Learner and version of its weights; data sets of one version follow each other."""
        self._failed_version: int | None = None
        """Version for which the engine failed to start or to load, and which was left to other actors."""

    @property
    def serves(self) -> bool:
        return not isinstance(self._engine, Fleet) or self._engine.serves

    async def start(self) -> None:
        """Start the engine before an evaluation needs it. Raises EngineError or ConfigError."""
        self._engine = engine = self._build()
        await engine.start()

    async def with_weights(self, policy: PolicyManifest, stop: asyncio.Event) -> Engine | None:
        """Fetch the weights, also those of a learner that is gone, and load them. An engine that cannot is
        closed, and the next evaluation starts another: rollouts go on meanwhile."""
        wanted = policy.incarnation, policy.policy_version
        if self._engine is not None and self._has == wanted:
            return self._engine
        self._has = None
        state = await fetch_state(self._blobs, policy)
        try:
            if self._engine is None:
                await self.start()
            assert self._engine is not None, "it was started"
            await self._engine.load_weights(state, policy.policy_version)
        except (EngineError, RuntimeError) as error:  # torch raises a RuntimeError when memory is short
            raise await self._given_up(policy, error) from error
        self._has = wanted
        return self._engine

    async def after_loss(self, policy: PolicyManifest, error: EngineLostError) -> EngineError | HandBackError:
        """Close the engine: the next evaluation starts another, and rollouts go on meanwhile."""
        return await self._given_up(policy, error)

    async def _given_up(self, policy: PolicyManifest, error: Exception) -> EngineError | HandBackError:
        await self.close()
        reason = f"the evaluation engine failed: {type(error).__name__}: {error}"
        before, self._failed_version = self._failed_version, policy.policy_version
        if before == policy.policy_version:  # the task came back: nobody else had it, or they failed too
            return EngineError(reason)
        return HandBackError(reason)

    async def close(self) -> None:
        engine, self._engine, self._has = self._engine, None, None
        if engine is not None:
            await engine.close()


class RolloutEngines:
    """The engines that roll out. They take newer weights while they answer; each token has its version."""

    finishes_begun = True
    exact = False

    def __init__(
        self, bus: Bus, engine: Engine, follower: PolicyFollower, *, prompts_at_once: int | None
    ) -> None:
        """Use `engine`, to which `follower` brings weights and which others close."""
        self.prompts_at_once = prompts_at_once
        self._bus = bus
        self._engine = engine
        self._follower = follower

    @property
    def serves(self) -> bool:
        return not isinstance(self._engine, Fleet) or self._engine.serves

    async def with_weights(self, policy: PolicyManifest, stop: asyncio.Event) -> Engine | None:
        """Wait until the engines have these weights or later ones; nothing is fetched for an evaluation."""
        version, give_up = policy.policy_version, time.monotonic() + PATIENCE_S
        while (left := give_up - time.monotonic()) > 0 and not stop.is_set():
            if not await self._of_the_learner(policy):
                return None
            try:
                async with asyncio.timeout(min(LOOK_S, left)):
                    await self._follower.at_least(version, of=policy.incarnation)
            except TimeoutError:
                continue
            return self._engine
        if stop.is_set():
            raise HandBackError(f"evaluation of version {version} was not begun when this actor was stopped")
        raise HandBackError(
            f"evaluation of version {version}: after {PATIENCE_S:g} s the engines of this actor still have "
            f"version {self._engine.policy_version}: they are slow to load it, or it could not be had, "
            "of which this actor's log says weights_not_fetched"
        )

    async def after_loss(self, policy: PolicyManifest, error: EngineLostError) -> EngineError:
        """Return the error, which ends the actor: it can roll nothing out either."""
        return error

    async def close(self) -> None:
        """Leave the engines open, since rollouts use them."""

    async def _of_the_learner(self, policy: PolicyManifest) -> bool:
        """Return whether the learner of these weights is the latest one, so that its versions arrive here."""
        try:
            found = await self._bus.get("policy", PolicyManifest)
        except BusError as error:
            log.warning("policy_not_known", reason=str(error))
            return True
        return found is None or found[0].incarnation == policy.incarnation
