"""Checks at each version that engines sample from the policy that they say they have.

The learner scores a fixed probe when it publishes (learner/publication/probe.py). Here each engine scores it
after it took the version, and the two are compared."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import structlog

from actors.engines.fleet.engine_life import Scored
from bus.messages import PolicyManifest
from bus.waiting import set_within

log = structlog.get_logger()
POLL_S = 1.0
REMEMBERED = 8
"""Earlier versions whose log-probs an engine is compared with as well."""
CLOSER = 0.5
"""An engine has older weights where it is nearer to theirs than this part of its distance from its own."""
SAME_NATS = 1e-4
"""Mean difference that different kernels make in float32: below it an engine has the weights."""


class Engines(Protocol):
    """Engines that can tell the log-probs of given tokens."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Scored]:
        """Return what each engine says, by its name."""


class ProbeCheck:
    """Compares engines with the learner after each version, and keeps the alarms."""

    def __init__(self, engines: Engines, *, bound_nats: float, exact: bool = False) -> None:
        """With `exact`, any difference is an alarm."""
        self.alarms: dict[str, str] = {}
        """What is wrong, in words, by engine."""
        self.nats: dict[str, float] = {}
        """Mean difference from the learner over the probe's tokens, by engine, at the latest version."""
        self._engines = engines
        self._bound = 0.0 if exact else bound_nats
        self._limit = f"actors.probe_bound_nats is {bound_nats:g}: it samples from another policy"
        if exact:
            self._limit = "model.numerics=exact allows none: compare torch and transformers of both hosts"
        self._loaded = asyncio.Event()
        self._newest: PolicyManifest | None = None
        self._expected: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        """Log-probs by the learner's incarnation and version, of the versions loaded last."""

    def loaded(self, manifest: PolicyManifest) -> None:
        """Have the engines checked, which took this version just now."""
        if manifest.probe is None:
            return
        self._newest = manifest
        expected = np.concatenate(manifest.probe.logprobs)
        self._expected[manifest.incarnation, manifest.policy_version] = expected
        while len(self._expected) > 1 + REMEMBERED:
            self._expected.popitem(last=False)
        self._loaded.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Check after each version until `stop`; of those that come meanwhile, the newest."""
        while not stop.is_set():
            if await set_within(self._loaded, POLL_S):
                self._loaded.clear()
                await self.check()

    async def check(self) -> None:
        """Compare each engine that can tell, at the version that it has."""
        newest = self._newest
        if newest is None or newest.probe is None:
            return
        found = await self._engines.score(newest.probe.token_ids)
        self.nats, before, self.alarms = {}, self.alarms, {}
        for name, scored in found.items():
            if alarm := self._compared(name, scored, newest.incarnation):
                self.alarms[name] = alarm
                if name not in before:
                    log.error("engine_differs_from_learner", engine=name, reason=alarm)
            elif name in before:
                log.info("engine_agrees_with_learner", engine=name, policy_version=scored.policy_version)

    def _compared(self, name: str, scored: Scored, incarnation: str) -> str:
        """Note an engine's difference from the learner; return what is wrong with it, if anything is."""
        said, version = np.concatenate(scored.logprobs), scored.policy_version
        nats = {
            of: float(np.abs(said - expected).mean())
            for (learner, of), expected in self._expected.items()
            if learner == incarnation
        }
        if version not in nats:
            return ""  # it had another learner's weights, or a version that came since
        own = self.nats[name] = nats[version]
        nearest = min(nats, key=lambda of: nats[of])
        if own > SAME_NATS and nats[nearest] < CLOSER * own:
            return f"{name} says that it has version {version}, but it samples as version {nearest} did"
        if not own <= self._bound:
            return (
                f"{name} differs from the learner by {own:.3g} nats a token on the probe of version "
                f"{version}, {self._limit}"
            )
        return ""
