"""Receives weights: makes the newest version on the host from snapshots and deltas, verified."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog

from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.changes import note
from actors.weights.adapters import base_weights, beside, merged_weights
from bus.errors import BusError, ConfigError, StorageError
from bus.messages import AdaptedBase, BlobRef, DeltaRef, PolicyManifest
from bus.process.process_tuning import return_freed_memory
from bus.streams.publish import together
from storage.weights.array_pool import SpareMemory
from storage.weights.blob_sources import BlobSource
from storage.weights.deltas import apply_delta
from storage.weights.quantisation import published_as
from storage.weights.tensors import Weights, read_snapshot, spare_threads

log = structlog.get_logger()
T = TypeVar("T")


class Receiver:
    """Holds the newest weights received from one learner, and makes later ones from them.

    `ConfigError` is raised for weights that are quantised in another way than the first: engines were started
    for those."""

    def __init__(self, blobs: BlobSource, *, served: ServedAdapters | None = None) -> None:
        """Receive from `blobs`. Adapters that are `served` are handed on beside their frozen weights."""
        self.weights: Weights | None = None
        """As they are published: adapters alone, where these are."""
        self._blobs = blobs
        self._served = served
        self.lacks_base = False
        """Whether the frozen weights of adapters could not be had when they were last needed."""
        self._base: tuple[str, Weights] | None = None
        """Frozen weights of the adapters, with the digest of their bytes."""
        self._incarnation = ""
        self._published_as = ""
        """How the first weights are quantised."""
        self._spare = SpareMemory()
        """Memory of earlier versions; engines keep the last of them until they have the next."""

    async def advance(self, manifest: PolicyManifest) -> Weights:
        """Return the weights that `manifest` announces, by deltas from those held or from its snapshot.

        Everything is verified before any of it is visible. Raises `BusError` or `StorageError` when neither
        way works; then the weights held stay. Raises `ConfigError` where engines serve other adapters.
        """
        try:
            published = await self._by_deltas(manifest) or await self._from_snapshot(manifest)
            self._refuse_other_format(published)
            whole = await self._whole(manifest.adapted, published)
        finally:
            self._spare.trim()  # memory of an older version, or of other tensors
        if self.weights is not None:  # unchanged tensors stay in place: engines use them there
            published = published.sharing(self.weights)
        self.weights, self._incarnation = published, manifest.incarnation
        return whole if manifest.adapted is not None else published

    async def from_snapshot(self, manifest: PolicyManifest) -> Weights:
        """Return the weights that `manifest` announces, from its snapshot. Raises as `advance` does."""
        return await self._whole(manifest.adapted, await self._from_snapshot(manifest))

    async def _whole(self, adapted: AdaptedBase | None, published: Weights) -> Weights:
        """Return the weights for an engine that the published ones stand for."""
        if self._served is not None:
            self._served.refuse_others(adapted)
        if adapted is None:
            self.lacks_base = False
            return published
        if self._base is None or self._base[0] != adapted.weights.digest:
            self.lacks_base = True
            weights = await base_weights(self._blobs, adapted.weights, self._fetch_base)
            self._base, self.lacks_base = (adapted.weights.digest, weights), False
        base = self._base[1]
        if self._served is not None:
            return beside(base, published)
        return await _in_threads(
            partial(merged_weights, base, published, adapted.scale, like=self._spare.like)
        )

    def _refuse_other_format(self, published: Weights) -> None:
        """Raise `ConfigError` unless these weights are quantised as the first were."""
        found = published_as(published.tensors)
        self._published_as = self._published_as or found
        if found != self._published_as:
            raise ConfigError(
                f"the learner publishes weights with learner.publication.quantisation={found} now, and the "
                f"engines of this actor were started for {self._published_as}: start this actor again"
            )

    async def _fetch_base(self, ref: BlobRef) -> Weights:
        data = await self._blobs.get(ref)
        return await _in_threads(partial(read_snapshot, data, 0))

    async def _from_snapshot(self, manifest: PolicyManifest) -> Weights:
        tail = manifest.since(manifest.snapshot_at) or ()
        data = await self._blobs.get(manifest.snapshot)
        snapshot = await _in_threads(
            partial(read_snapshot, data, manifest.snapshot_at, like=self._spare.like)
        )
        return await self._later(snapshot, tail)

    async def _by_deltas(self, manifest: PolicyManifest) -> Weights | None:
        """Apply deltas to the weights held; return `None` if no unbroken chain starts from them."""
        held = self.weights
        if held is None or self._incarnation != manifest.incarnation:
            return None
        chain = manifest.since(held.policy_version)
        if chain is None or _size(chain) > manifest.snapshot.size_bytes:
            return None
        try:
            return await self._later(held, chain)
        except (BusError, StorageError) as error:
            log.warning("delta_refused", policy_version=manifest.policy_version, reason=str(error))
            return None

    async def _later(self, base: Weights, chain: Sequence[DeltaRef]) -> Weights:
        for delta, data in zip(
            chain, await together(self._blobs.get(delta.blob) for delta in chain), strict=True
        ):
            base = await _in_threads(partial(apply_delta, base, data, note=note, like=self._spare.like))
            if base.policy_version != delta.policy_version:
                raise StorageError(
                    f"the delta to version {delta.policy_version} leads to version {base.policy_version}"
                )
        return base


async def _in_threads(work: Callable[[Executor], T]) -> T:
    """Run `work` beside the event loop, with threads that it may use."""

    def working() -> T:
        with ThreadPoolExecutor(spare_threads(), "weights") as threads:
            done = work(threads)
        return_freed_memory()
        return done

    return await asyncio.to_thread(working)


def _size(chain: Sequence[DeltaRef]) -> int:
    return sum(delta.blob.size_bytes for delta in chain)
