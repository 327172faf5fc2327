"""Follows the policy: fetches new versions outside the pause and swaps them into the engine."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog
import torch

from actors.engines.announced_version import Published
from actors.engines.base import Engine, TakesPublished
from actors.engines.served_adapters import ServedAdapters
from actors.weights.first_policy import actor_name
from actors.weights.received import Receiver, torch_tensors
from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusAwayError, BusError, ConfigError, SluiceError, StorageError, WeightsKeptError
from bus.messages import BlobRef, ModelFiles, PolicyManifest, SnapshotWanted
from bus.streams.blob_store import get_blob
from bus.waiting import set_within
from storage.model_files.packed_files import unbundle
from storage.weights.blob_sources import Blobs, BlobSource
from storage.weights.quantisation import with_scales
from storage.weights.tensors import Weights

T = TypeVar("T")
CANCEL_S = 5.0
"""A fetch that does not end in this time is asked to again."""


class Newest(Generic[T]):
    """Fetches one version at a time and loads another meanwhile.

    A newer version does not interrupt the fetch of an older one: deltas lead on from the older version, and
    where snapshots are announced faster than they can be fetched, some must arrive. A version of a learner
    that died is given up at once. The version that was fetched last is loaded next; versions that it overtook
    are never loaded. With `loads_at_once` above 1, a load does not wait for the load before it: this suits an
    engine that continues with the newer version where it has not taken the older one."""

    def __init__(
        self,
        receive: Callable[[PolicyManifest], Awaitable[T | None]],
        load: Callable[[T], Awaitable[bool]],
        *,
        loads_at_once: int,
    ) -> None:
        """`receive` fetches a version, `None` where it cannot be had now. `load` has an engine take it.
        `load` is called in the order of the fetches; False where the version is to be fetched again."""
        self.announced: PolicyManifest | None = None
        self.fetched: PolicyManifest | None = None
        self.news = asyncio.Event()
        """Set when there may be something to `pursue`."""
        self._receive = receive
        self._load = load
        self._slots = asyncio.Semaphore(loads_at_once)
        self._weights: T | None = None
        self._aim: PolicyManifest | None = None
        """What is being fetched."""
        self._fetching: asyncio.Task[None] | None = None

    def hear(self, manifest: PolicyManifest) -> None:
        """Take note of an announcement, unless the same learner has announced a later version."""
        known = self.announced
        same_learner = known is not None and known.incarnation == manifest.incarnation
        if known is not None and same_learner and manifest.policy_version < known.policy_version:
            return
        if manifest != known:
            self.announced = manifest
            self.news.set()

    async def pursue(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to fetch the weights announced last, and to load them then, unless that is under way."""
        self.news.clear()
        manifest = self.announced
        if manifest is None:
            return
        if self._aim is not None and self._aim.incarnation != manifest.incarnation:
            await self.stop_fetching()
        if self._aim is None and not _same_weights(manifest, self.fetched):
            self._aim = manifest
            self._fetching = tasks.create_task(self._fetch(manifest, tasks))

    async def stop_fetching(self) -> None:
        """Fetch no more; what is being loaded is."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching], timeout=CANCEL_S)
            if self._fetching.done():  # perhaps before the fetch began
                self._aim = None

    async def _fetch(self, manifest: PolicyManifest, tasks: asyncio.TaskGroup) -> None:
        try:
            weights = await self._receive(manifest)
        finally:
            self._aim = None
        if weights is not None:
            self.fetched, self._weights = manifest, weights
            tasks.create_task(self._load_newest())
        if manifest != self.announced:
            self.news.set()

    async def _load_newest(self) -> None:
        async with self._slots:
            manifest, weights = self.fetched, self._weights
            if manifest is None or weights is None:
                return
            self._weights = None  # loaded once
            if not await self._load(weights) and self.fetched is manifest:
                self.fetched = None


def _same_weights(one: PolicyManifest, other: PolicyManifest | None) -> bool:
    return other is not None and (one.incarnation, one.policy_version) == (
        other.incarnation,
        other.policy_version,
    )


log = structlog.get_logger()
POLL_S = 1.0
POLL_MANY_S = 3.0
"""The same for each factor by which a run of many actors is slower."""
JITTER = 0.25
"""Share by which polls are sooner or later, so that actors which heard one notice do not poll together."""
AGAIN_S = 5.0
"""Seconds until a version that failed is fetched again, unless another one is announced."""


async def fetch_state(blobs: BlobSource, manifest: PolicyManifest) -> Mapping[str, torch.Tensor]:
    """Fetch the weights of one version, by Hugging Face name. Raises `BusError` when they are gone or
    damaged, `StorageError` when they differ from the announcement."""
    weights = await Receiver(blobs).from_snapshot(manifest)
    return torch_tensors(weights.tensors)


async def fetch_model_files(bus: Bus, ref: BlobRef, directory: Path) -> Path:
    """Write config, tokenizer and chat template of the run's model into `directory`, and return it."""
    files = decode(await get_blob(bus, ref), ModelFiles)
    await asyncio.to_thread(unbundle, files, directory)
    return directory


async def obtain_model(
    bus: Bus, manifest: PolicyManifest, directory: Path, *, patience_s: float, stop: asyncio.Event
) -> Path | None:
    """Do `fetch_model_files` for the newest policy; ask the learner for files that the bus lost. Returns None
    on `stop`. Raises `BusAwayError` after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not stop.is_set():
        try:
            return await fetch_model_files(bus, manifest.model, directory)
        except BusError as error:
            if time.monotonic() > deadline:
                raise BusAwayError(
                    f"waited {patience_s:g} s for the model's config and tokenizer: {error}. "
                    "Is `launch learner` running for this run?"
                ) from error
            log.warning("model_files_not_fetched", reason=str(error))
            wanted = SnapshotWanted(incarnation="", policy_version=-1, reason=str(error))
            await bus.notify(bus.subject("notice", "snapshot"), wanted)
        await set_within(stop, POLL_S)
        found = await bus.get("policy", PolicyManifest)
        manifest = found[0] if found else manifest
    return None


@dataclass(frozen=True, slots=True)
class _Received:
    """Weights that were received, and their announcement."""

    manifest: PolicyManifest
    weights: Weights


class PolicyFollower:
    """Keeps one engine at the newest version available; versions in between are skipped."""

    def __init__(
        self, bus: Bus, engine: Engine, blobs: BlobSource | None = None, *,
        loads_at_once: int = 1, from_learner: bool = False, served: ServedAdapters | None = None,
        on_loaded: Callable[[PolicyManifest], None] | None = None,
    ) -> None:  # fmt: skip
        """Follow the policy with `engine`.

        Args:
            bus: connection of the run.
            engine: started, or about to be.
            blobs: source of the announced weights; without it the bus.
            loads_at_once: above 1 for an engine in which a later call replaces one in progress.
            from_learner: the engine is `TakesPublished`, and the learner itself sends it the weights.
            served: adapters that the engine is given beside their frozen weights; without it, merged.
            on_loaded: is called with each version that the engine has taken."""
        self.pause_s = 0.0
        """Seconds generation stood still for the latest swap."""
        self.receive_s = 0.0
        """Seconds from the announcement of the latest received version until it was here and verified."""
        self.refusal = ""
        """Why engines go on without the newest version, which they cannot have; empty where they have it."""
        self._bus = bus
        self._engine = engine
        self._on_loaded = on_loaded
        self._swapped = asyncio.Condition()
        self._receiver = Receiver(blobs or Blobs(bus), served=served)
        self._shares = served is not None and served.beside is not None
        """Whether engines serve other policies too, which are not to end with this one."""
        self._receiving = asyncio.Lock()
        self._given: Mapping[str, bytes] = {}
        """Digests of the tensors that the engine has."""
        self._learners: set[str] = set()
        """Learner incarnations whose weights the engine was given."""
        self._newest: Newest[_Received] | Newest[Published] = (
            Newest(self._announce, self._have_sent, loads_at_once=loads_at_once)
            if from_learner
            else Newest(self._receive, self._load, loads_at_once=loads_at_once)
        )
        self._failed: tuple[PolicyManifest | None, float] = None, 0.0
        """Version that failed, and until when it is not tried again."""
        self._behind = False
        """Whether a version is needed that was not announced here."""

    @property
    def latest(self) -> PolicyManifest | None:
        """Newest announcement."""
        return self._newest.announced

    @property
    def stage(self) -> str:
        return self.latest.stage if self.latest else ""

    async def run(self, stop: asyncio.Event) -> None:
        newest = self._newest
        listening = await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, newest.hear)
        async with asyncio.TaskGroup() as tasks:
            poll_s = 0.0
            while not stop.is_set():
                if time.monotonic() >= poll_s or self._behind:
                    self._behind = False
                    found = await self._bus.get("policy", PolicyManifest)
                    if found is not None:
                        newest.hear(found[0])
                    poll_s = time.monotonic() + self._until_poll_s()
                await newest.pursue(tasks)
                # `stop` is looked at, and a version that failed tried again, each second
                await set_within(newest.news, min(POLL_S, max(0.0, poll_s - time.monotonic())))
            await newest.stop_fetching()
        await listening.unsubscribe()

    def _until_poll_s(self) -> float:
        """Return the seconds until the key is looked at again, should a notice be lost."""
        slower = self._bus.slower
        if slower <= 1:
            return POLL_S
        return POLL_MANY_S * slower * random.uniform(1 - JITTER, 1 + JITTER)

    def _look_again(self, policy_version: int) -> None:
        """Look at the key at once if a version is needed that nobody has announced here: its notice was
        lost, or is about to come."""
        if self.latest is None or self.latest.policy_version < policy_version:
            self._behind = True
            self._newest.news.set()

    async def at_least(self, policy_version: int, *, of: str | None = None) -> None:
        """Wait until the engine's weights are `policy_version` or newer, so that no token exceeds the bound.

        The learner of a lease's version may have died and resumed from an older one. The version comes again
        if the steps taken back leave enough groups; otherwise storage lowers the lease's version. With `of`
        only weights of that learner incarnation count.
        """
        self._look_again(policy_version)
        async with self._swapped:
            await self._swapped.wait_for(
                lambda: self._engine.policy_version >= policy_version and (of is None or self._is_of(of))
            )

    def _is_of(self, incarnation: str) -> bool:
        """Return whether the engine has weights of that learner incarnation, and it is the latest."""
        latest = self.latest.incarnation if self.latest else ""
        return incarnation == latest and incarnation in self._learners

    async def _receive(self, manifest: PolicyManifest) -> _Received | None:
        if self._refused(manifest):
            return None
        began = time.monotonic()
        try:
            weights = await self._receiver.advance(manifest)
        except (BusError, StorageError) as error:  # the old version stays in service meanwhile
            await self._not_had(manifest, error)
            return None
        except ConfigError as error:
            if not self._shares:
                raise
            await self._cannot_have(manifest, error)
            return None
        self.receive_s = time.monotonic() - began
        return _Received(manifest, weights)

    async def _load(self, received: _Received) -> bool:
        weights = received.weights
        changed = with_scales(weights.changed_since(self._given), weights.tensors)
        self._given = weights.digests
        try:
            pause_s = await self._engine.load_weights(torch_tensors(changed), weights.policy_version)
        except WeightsKeptError as error:
            await self._cannot_have(received.manifest, error)
            return False
        await self._loaded(received.manifest, pause_s)
        return True

    async def _announce(self, manifest: PolicyManifest) -> Published | None:
        if self._refused(manifest):
            return None
        return Published(self._bus, manifest, self._fetched, actor=actor_name())

    async def _have_sent(self, published: Published) -> bool:
        """Make the engine take weights from the learner; return False if that was impossible."""
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
        """Fetch the tensors for engines that the learner could not send them to."""
        async with self._receiving:
            return torch_tensors((await self._receiver.advance(manifest)).tensors)

    async def _loaded(self, manifest: PolicyManifest, pause_s: float) -> None:
        self.pause_s = pause_s
        self.refusal = ""
        self._learners.add(manifest.incarnation)
        log.debug("weights_swapped", policy_version=manifest.policy_version, pause_s=round(pause_s, 4))
        if self._on_loaded is not None:
            self._on_loaded(manifest)
        async with self._swapped:
            self._swapped.notify_all()

    def _refused(self, manifest: PolicyManifest) -> bool:
        tried, until = self._failed
        return manifest == tried and time.monotonic() < until

    async def _not_had(self, manifest: PolicyManifest, error: Exception) -> None:
        log.warning("weights_not_fetched", policy_version=manifest.policy_version, reason=str(error))
        await self._ask_for_snapshot(manifest, str(error))

    async def _cannot_have(self, manifest: PolicyManifest, error: SluiceError) -> None:
        """Note a version that engines cannot have as it is; they go on with the one before."""
        self.refusal = f"version {manifest.policy_version} is refused: {error}"
        await self._not_had(manifest, error)

    async def _ask_for_snapshot(self, manifest: PolicyManifest, reason: str) -> None:
        """Ask the learner for a whole snapshot, unless a later version has come meanwhile."""
        self._failed = manifest, time.monotonic() + AGAIN_S
        wanted = SnapshotWanted(
            incarnation=manifest.incarnation,
            policy_version=manifest.policy_version,
            reason=reason,
            lacks_base=self._receiver.lacks_base,
        )
        await self._bus.notify(self._bus.subject("notice", "snapshot"), wanted)
