"""Follow the policy: fetch each newly published version outside the pause and swap it into the engine."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch
from safetensors.torch import load

from actors.engines.base import Engine
from bus.blobs import get_blob
from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef, ModelFiles, PolicyManifest
from storage.model_files import unbundle

log = structlog.get_logger()
POLL_S = 1.0
"""Notices can be lost; the key cannot."""


async def fetch_state(bus: Bus, manifest: PolicyManifest) -> Mapping[str, torch.Tensor]:
    """The weights of one version, by Hugging Face name. Raises `BusError` when they are gone or damaged."""
    data = await get_blob(bus, manifest.snapshot)
    state: Mapping[str, torch.Tensor] = await asyncio.to_thread(load, data)
    return state


async def fetch_model_files(bus: Bus, ref: BlobRef, directory: Path) -> Path:
    """Write config, tokenizer and chat template of the run's model into `directory`, and return it."""
    files = decode(await get_blob(bus, ref), ModelFiles)
    await asyncio.to_thread(unbundle, files, directory)
    return directory


class PolicyFollower:
    """Keeps one engine at the latest version it can get; in between versions are skipped."""

    def __init__(self, bus: Bus, engine: Engine) -> None:
        self.latest: PolicyManifest | None = None
        self.pause_s = 0.0
        """Seconds generation stood still for the latest swap."""
        self._bus = bus
        self._engine = engine
        self._news = asyncio.Event()
        self._swapped = asyncio.Condition()
        self._in_use: PolicyManifest | None = None

    @property
    def stage(self) -> str:
        """What the learner is doing, as of its latest publication."""
        return self.latest.stage if self.latest else ""

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop`."""
        listening = await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, self._hear)
        while not stop.is_set():
            found = await self._bus.get("policy", PolicyManifest)
            if found is not None:
                self._hear(found[0])
            await self._swap_if_new()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()
            except TimeoutError:
                continue
        await listening.unsubscribe()

    async def at_least(self, policy_version: int) -> None:
        """Return once the engine's weights are `policy_version` or younger: so no token exceeds the bound.

        A lease may be of a version whose learner died and resumed from an older one. That version comes again
        if the steps taken back leave groups enough; else storage lowers the lease's version.
        """
        async with self._swapped:
            await self._swapped.wait_for(lambda: self._engine.policy_version >= policy_version)

    def _hear(self, manifest: PolicyManifest) -> None:
        known = self.latest
        same_learner = known is not None and known.incarnation == manifest.incarnation
        if known is not None and same_learner and manifest.policy_version < known.policy_version:
            return
        if manifest != known:
            self.latest = manifest
            self._news.set()

    async def _swap_if_new(self) -> None:
        self._news.clear()
        manifest = self.latest
        if manifest is None or _same_weights(manifest, self._in_use):
            return
        try:
            state = await fetch_state(self._bus, manifest)
        except BusError as error:  # a younger version replaced it meanwhile: the next round takes that one
            log.warning("weights_not_fetched", policy_version=manifest.policy_version, reason=str(error))
            return
        self.pause_s = await self._engine.load_weights(state, manifest.policy_version)
        self._in_use = manifest
        log.debug("weights_swapped", policy_version=manifest.policy_version, pause_s=round(self.pause_s, 4))
        async with self._swapped:
            self._swapped.notify_all()


def _same_weights(one: PolicyManifest, other: PolicyManifest | None) -> bool:
    return other is not None and one.snapshot == other.snapshot and one.policy_version == other.policy_version
