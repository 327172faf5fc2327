"""Follow the policy: get each newly published version outside the pause and swap it into the engine."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from actors.engines.announced_version import Published
from actors.engines.base import Engine, TakesPublished
from actors.weights.latest_version import Newest
from actors.weights.received import Receiver, torch_tensors
from bus.blobs import get_blob
from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusError, ConfigError, StorageError, WeightsKeptError
from bus.messages import AnchorWanted, BlobRef, ModelFiles, PolicyManifest
from bus.waiting import set_within
from storage.weights.blob_sources import Blobs, BlobSource
from storage.weights.model_files import unbundle
from storage.weights.tensors import Weights

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


async def obtain_model(
    bus: Bus, manifest: PolicyManifest, directory: Path, *, patience_s: float, stop: asyncio.Event
) -> Path | None:
    """As `fetch_model_files`, of the policy announced last; the learner is asked for what the bus lost.

    None on `stop`. Raises `ConfigError` after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not stop.is_set():
        try:
            return await fetch_model_files(bus, manifest.model, directory)
        except BusError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"waited {patience_s:g} s for the model's config and tokenizer: {error}. "
                    "Is `launch learner` running for this run?"
                ) from error
            log.warning("model_files_not_fetched", reason=str(error))
            wanted = AnchorWanted(incarnation="", policy_version=-1, reason=str(error))
            await bus.notify(bus.subject("notice", "anchor"), wanted)
        await set_within(stop, POLL_S)
        found = await bus.get("policy", PolicyManifest)
        manifest = found[0] if found else manifest
    return None


@dataclass(frozen=True, slots=True)
class _Received:
    """Weights that are here, and the announcement of them."""

    manifest: PolicyManifest
    weights: Weights


class PolicyFollower:
    """Keeps one engine at the latest version it can get; in between versions are skipped."""

    def __init__(
        self, bus: Bus, engine: Engine, blobs: BlobSource | None = None, *,
        loads_at_once: int = 1, from_learner: bool = False,
    ) -> None:  # fmt: skip
        """Follow with `engine`, which takes the tensors from here.

        Args:
            bus: the run's.
            engine: started, or about to be.
            blobs: where what is announced comes from; the bus without it.
            loads_at_once: above 1 for an engine in which a later call supersedes one at work.
            from_learner: the engine is `TakesPublished`: the learner itself sends it what is announced."""
        self.pause_s = 0.0
        """Seconds generation stood still for the latest swap."""
        self.receive_s = 0.0
        """Seconds from hearing of the version received last until it was here, verified."""
        self._bus = bus
        self._engine = engine
        self._swapped = asyncio.Condition()
        self._receiver = Receiver(blobs or Blobs(bus))
        self._receiving = asyncio.Lock()
        self._given: Mapping[str, bytes] = {}
        """Digests of the tensors that the engine was given last."""
        self._learners: set[str] = set()
        """Incarnations whose weights the engine was given; it has those of the last of them."""
        self._newest: Newest[_Received] | Newest[Published] = (
            Newest(self._announce, self._have_sent, loads_at_once=loads_at_once)
            if from_learner
            else Newest(self._receive, self._load, loads_at_once=loads_at_once)
        )
        self._failed: tuple[PolicyManifest | None, float] = None, 0.0
        """What could not be had, and until when not to try it again."""

    @property
    def latest(self) -> PolicyManifest | None:
        """What was announced last."""
        return self._newest.announced

    @property
    def stage(self) -> str:
        """What the learner is doing, as of its latest publication."""
        return self.latest.stage if self.latest else ""

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until `stop`."""
        newest = self._newest
        listening = await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, newest.hear)
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                found = await self._bus.get("policy", PolicyManifest)
                if found is not None:
                    newest.hear(found[0])
                await newest.pursue(tasks)
                await set_within(newest.news, POLL_S)
            await newest.stop_fetching()
        await listening.unsubscribe()

    async def at_least(self, policy_version: int, *, of: str | None = None) -> None:
        """Return once the engine's weights are `policy_version` or younger: so no token exceeds the bound.

        A lease may be of a version whose learner died and resumed from an older one. That version comes again
        if the steps taken back leave groups enough; else storage lowers the lease's version. With `of` only
        weights of the learner of that incarnation count.
        """
        async with self._swapped:
            await self._swapped.wait_for(
                lambda: self._engine.policy_version >= policy_version and (of is None or self._is_of(of))
            )

    def _is_of(self, incarnation: str) -> bool:
        """Whether the engine's weights are of the learner of that incarnation, and it is the latest."""
        latest = self.latest.incarnation if self.latest else ""
        return incarnation == latest and incarnation in self._learners

    async def _receive(self, manifest: PolicyManifest) -> _Received | None:
        if self._refused(manifest):
            return None
        began = time.monotonic()
        try:
            weights = await self._receiver.advance(manifest)
        except (BusError, StorageError) as error:  # the old version goes on meanwhile
            await self._not_had(manifest, error)
            return None
        self.receive_s = time.monotonic() - began
        return _Received(manifest, weights)

    async def _load(self, received: _Received) -> bool:
        weights = received.weights
        changed, self._given = weights.changed_since(self._given), weights.digests
        pause_s = await self._engine.load_weights(torch_tensors(changed), weights.policy_version)
        await self._loaded(received.manifest, pause_s)
        return True

    async def _announce(self, manifest: PolicyManifest) -> Published | None:
        return None if self._refused(manifest) else Published(self._bus, manifest, self._fetched)

    async def _have_sent(self, published: Published) -> bool:
        """Have the engine take what the learner sends; False where there was no way."""
        engine = self._engine
        if not isinstance(engine, TakesPublished):
            raise TypeError(f"{type(engine).__name__} takes weights from its host only")
        try:
            pause_s = await engine.load_published(published)
        except WeightsKeptError as error:
            await self._not_had(published.manifest, error)
            return False
        await self._loaded(published.manifest, pause_s)
        return True

    async def _fetched(self, manifest: PolicyManifest) -> Mapping[str, torch.Tensor]:
        """The tensors, for engines that the learner could not send them to."""
        async with self._receiving:
            return torch_tensors((await self._receiver.advance(manifest)).tensors)

    async def _loaded(self, manifest: PolicyManifest, pause_s: float) -> None:
        self.pause_s = pause_s
        self._learners.add(manifest.incarnation)
        log.debug("weights_swapped", policy_version=manifest.policy_version, pause_s=round(pause_s, 4))
        async with self._swapped:
            self._swapped.notify_all()

    def _refused(self, manifest: PolicyManifest) -> bool:
        """Whether exactly this was tried a moment ago, in vain."""
        tried, until = self._failed
        return manifest == tried and time.monotonic() < until

    async def _not_had(self, manifest: PolicyManifest, error: Exception) -> None:
        log.warning("weights_not_fetched", policy_version=manifest.policy_version, reason=str(error))
        await self._ask_for_anchor(manifest, str(error))

    async def _ask_for_anchor(self, manifest: PolicyManifest, reason: str) -> None:
        """The learner answers with a whole snapshot, unless a later version has come meanwhile."""
        self._failed = manifest, time.monotonic() + AGAIN_S
        wanted = AnchorWanted(
            incarnation=manifest.incarnation, policy_version=manifest.policy_version, reason=reason
        )
        await self._bus.notify(self._bus.subject("notice", "anchor"), wanted)
