"""Checks at each version that engines sample from the policy that they say they have. The learner scores a
fixed probe when it publishes (learner/publication/probe.py). Here each engine scores it after it took the
version, and the two are compared."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType

import numpy as np
import structlog

from actors.engines.fleet.fleet import Fleet
from bus.messages import PolicyManifest, Probe
from bus.process.kernel_versions import differences
from bus.waiting import set_within

log = structlog.get_logger()
POLL_S = 1.0
REMEMBERED = 8
"""Earlier versions whose log-probs an engine is compared with as well."""
CLOSER = 0.5
"""An engine has older weights where it is nearer to theirs than this part of its distance from its own."""
SAME_NATS = 1e-4
"""Mean difference that different kernels make in float32: below it an engine has the weights."""
Parts = Mapping[str, np.ndarray]
"""Log-probs of the sequences of text, and of those that show images: a vision tower with other weights
changes few of all tokens."""
WORDS = {"text": ("samples", "probe"), "images": ("sees images", "probe's image")}
"""What an engine does as another version did, and where it differs from the learner, by part of the probe."""


class ProbeCheck:
    """Compares engines with the learner after each version, and keeps the alarms."""

    def __init__(
        self, engines: Fleet, *, bound_nats: float, exact: bool = False,
        kernels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """With `exact`, any difference is an alarm, and so are other versions of packages than `kernels` has.
        Those are the engines', whose kernels the learner uses too; empty where it has its own."""
        self.alarms: dict[str, str] = {}
        """What is wrong, in words, by engine."""
        self.nats: dict[str, float] = {}
        """Mean difference from the learner over the probe's tokens, by engine, at the latest version; the
        greater of those of text and of what shows images."""
        self._engines = engines
        self._kernels = kernels
        self._bound = 0.0 if exact else bound_nats
        self._limit = f"actors.probe_bound_nats is {bound_nats:g}: it samples from another policy"
        if exact:
            self._limit = "model.numerics=exact allows none: compare torch and transformers of both hosts"
        self._loaded = asyncio.Event()
        self._newest: PolicyManifest | None = None
        self._expected: OrderedDict[tuple[str, int], Parts] = OrderedDict()
        """Log-probs by the learner's incarnation and version, of the versions loaded last."""

    def loaded(self, manifest: PolicyManifest) -> None:
        """Have the engines checked, which took this version just now."""
        if manifest.probe is None:
            return
        self._newest = manifest
        expected = _parts(manifest.probe, manifest.probe.logprobs)
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
        found = await self._engines.score(newest.probe.token_ids, newest.probe.images)
        kernels = differences(self._kernels, newest.kernels) if self._kernels else ""
        known = {version for learner, version in self._expected if learner == newest.incarnation}
        self.nats, before, self.alarms = {}, self.alarms, {}
        for name, scored in found.items():
            if name in before and scored.policy_version not in known:  # took an unscored version
                self.alarms[name] = before[name]
                continue
            parts = _parts(newest.probe, scored.logprobs)
            reasons = [
                self._compared(name, scored.policy_version, part, said, newest.incarnation)
                for part, said in parts.items()
            ]
            if kernels:
                reasons.append(f"{name} has {kernels}: install the same versions for both")
            if alarm := "; ".join(filter(None, reasons)):
                self.alarms[name] = alarm
                if name not in before:
                    log.error("engine_differs_from_learner", engine=name, reason=alarm)
            elif name in before:
                log.info("engine_agrees_with_learner", engine=name, policy_version=scored.policy_version)

    def _compared(self, name: str, version: int, part: str, said: np.ndarray, incarnation: str) -> str:
        """Note how far an engine is from the learner in a part of the probe; return what is wrong with it, if
        anything is."""
        nats = {
            of: float(np.abs(said - expected[part]).mean())
            for (learner, of), expected in self._expected.items()
            if learner == incarnation
        }
        if version not in nats:
            return ""  # the engine had another learner's weights, or a later version
        own = nats[version]
        self.nats[name] = float(np.maximum(own, self.nats.get(name, 0.0)))  # NaN, if one of them is
        nearest = min(nats, key=lambda of: nats[of])
        does, place = WORDS[part]
        if own > SAME_NATS and nats[nearest] < CLOSER * own:
            return f"{name} says that it has version {version}, but it {does} as version {nearest} did"
        if not own <= self._bound:
            return (
                f"{name} differs from the learner by {own:.3g} nats a token on the {place} of version "
                f"{version}, {self._limit}"
            )
        return ""


def _parts(probe: Probe, logprobs: Sequence[Sequence[float]]) -> Parts:
    """Return the log-probs of a probe's sequences by part; a part without any is missing."""
    parts: dict[str, list[float]] = {}
    for nats, images in zip_longest(logprobs, probe.images, fillvalue=()):
        parts.setdefault("images" if images else "text", []).extend(nats)
    return {part: np.array(nats) for part, nats in parts.items()}
