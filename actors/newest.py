"""Of the versions that are announced the newest wins, wherever the one before it has got to."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bus.messages import PolicyManifest
from storage.weights import HostTensor, Weights

CANCEL_S = 5.0
"""A fetch that does not end in this time is asked to again."""
Receive = Callable[[PolicyManifest], Awaitable[Weights | None]]
"""Fetches the weights of a version; `None` where they cannot be had now."""
Load = Callable[[Mapping[str, HostTensor], int], Awaitable[None]]
"""Has an engine take the tensors that differ from those of the call before."""


class Newest:
    """Fetches one version at a time and loads another meanwhile.

    A version that is announced while an older one is fetched waits for that: it is what deltas lead on from,
    and where whole snapshots come faster than they can be fetched, some arrive. Only what a dead learner
    announced is not waited for. What was fetched last is loaded next; what was overtaken by then never is.
    With `loads_at_once` above 1 a load does not wait for the one before, for an engine that goes on with
    the newer one where it has not taken the older."""

    def __init__(self, receive: Receive, load: Load, *, loads_at_once: int) -> None:
        self.announced: PolicyManifest | None = None
        self.fetched: PolicyManifest | None = None
        self.news = asyncio.Event()
        """Set when there may be something to `pursue`."""
        self._receive = receive
        self._load = load
        self._slots = asyncio.Semaphore(loads_at_once)
        self._weights: Weights | None = None
        """Of `fetched`."""
        self._aim: PolicyManifest | None = None
        """What is being fetched."""
        self._fetching: asyncio.Task[None] | None = None
        self._given: Mapping[str, bytes] = {}
        """Digests of the tensors that the engine was given last."""

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
            changed, self._given = weights.changed_since(self._given), weights.digests
            await self._load(changed, manifest.policy_version)


def _same_weights(one: PolicyManifest, other: PolicyManifest | None) -> bool:
    return other is not None and (one.incarnation, one.policy_version) == (
        other.incarnation,
        other.policy_version,
    )
