"""Loads the newest announced version, even while the one before it is still being loaded."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from bus.messages import PolicyManifest

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
        """Weights of the version `fetched`."""
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
        """Begin to fetch what was announced last, and to load it then, unless that is under way."""
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
            if self._fetching.done():  # perhaps before it began
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
