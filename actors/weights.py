"""Follow the policy: get each newly published version outside the pause and swap it into the engine."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch

from actors.engines.base import Engine, TakesPublished
from actors.engines.published import Published
from actors.received import Receiver, torch_tensors
from bus.blobs import get_blob
from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusError, StorageError, WeightsKeptError
from bus.messages import AnchorWanted, BlobRef, ModelFiles, PolicyManifest
from storage.blob_sources import Blobs, BlobSource
from storage.model_files import unbundle

log = structlog.get_logger()
POLL_S = 1.0
"""Notices can be lost; the key cannot."""
AGAIN_S = 5.0
"""Until what was refused is fetched again, unless something else is announced."""


async def fetch_state(blobs: BlobSource, manifest: PolicyManifest) -> Mapping[str, torch.Tensor]:
    """The weights of one version, by Hugging Face name.

    Raises `BusError` when they are gone or damaged, `StorageError` when they are not what was announced."""
    weights = await Receiver(blobs).anchored(manifest)
    return torch_tensors(weights.tensors)


async def fetch_model_files(bus: Bus, ref: BlobRef, directory: Path) -> Path:
    """Write config, tokenizer and chat template of the run's model into `directory`, and return it."""
    files = decode(await get_blob(bus, ref), ModelFiles)
    await asyncio.to_thread(unbundle, files, directory)
    return directory


class PolicyFollower:
    """Keeps one engine at the latest version it can get; in between versions are skipped."""

    def __init__(
        self, bus: Bus, engine: Engine, blobs: BlobSource | None = None, *, from_learner: bool = False
    ) -> None:
        """`from_learner`: the engine takes what is announced from the learner itself."""
        self.latest: PolicyManifest | None = None
        self.pause_s = 0.0
        """Seconds generation stood still for the latest swap."""
        self._bus = bus
        self._engine = engine
        self._news = asyncio.Event()
        self._swapped = asyncio.Condition()
        self._in_use: PolicyManifest | None = None
        self._receiver = Receiver(blobs or Blobs(bus))
        self._receiving = asyncio.Lock()
        self._sent_to = engine if from_learner and isinstance(engine, TakesPublished) else None
        self._given: Mapping[str, bytes] = {}
        """Digests of the tensors that the engine has."""
        self._failed: tuple[PolicyManifest | None, float] = None, 0.0
        """What could not be had, and until when not to try it again."""

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
        if manifest is None or _same_weights(manifest, self._in_use) or self._refused(manifest):
            return
        try:
            if self._sent_to is None:
                weights = await self._receiver.advance(manifest)
            else:
                published = Published(self._bus, manifest, self._fetched)
                self.pause_s = await self._sent_to.load_published(published)
        except (BusError, StorageError, WeightsKeptError) as error:  # the old version goes on meanwhile
            log.warning("weights_not_fetched", policy_version=manifest.policy_version, reason=str(error))
            await self._ask_for_anchor(manifest, str(error))
            return
        if self._sent_to is None:
            changed = torch_tensors(weights.changed_since(self._given))
            self.pause_s = await self._engine.load_weights(changed, manifest.policy_version)
            self._given = weights.digests
        self._in_use = manifest
        log.debug("weights_swapped", policy_version=manifest.policy_version, pause_s=round(self.pause_s, 4))
        async with self._swapped:
            self._swapped.notify_all()

    async def _fetched(self, manifest: PolicyManifest) -> Mapping[str, torch.Tensor]:
        """The tensors, for engines that the learner could not send them to."""
        async with self._receiving:
            return torch_tensors((await self._receiver.advance(manifest)).tensors)

    def _refused(self, manifest: PolicyManifest) -> bool:
        """Whether exactly this was tried a moment ago, in vain."""
        tried, until = self._failed
        return manifest == tried and time.monotonic() < until

    async def _ask_for_anchor(self, manifest: PolicyManifest, reason: str) -> None:
        """The learner answers with a whole snapshot, unless a later version has come meanwhile."""
        self._failed = manifest, time.monotonic() + AGAIN_S
        wanted = AnchorWanted(
            incarnation=manifest.incarnation, policy_version=manifest.policy_version, reason=reason
        )
        await self._bus.notify(self._bus.subject("notice", "anchor"), wanted)


def _same_weights(one: PolicyManifest, other: PolicyManifest | None) -> bool:
    return other is not None and (one.incarnation, one.policy_version) == (
        other.incarnation,
        other.policy_version,
    )
