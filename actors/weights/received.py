"""Receives weights: makes the newest version on the host from snapshots and deltas, verified."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import torch
from xxhash import xxh3_128_digest

from actors.engines.served_adapters import ServedAdapters
from actors.engines.sglang.changes import note
from bus.errors import BusError, ConfigError, StorageError
from bus.messages import AdaptedBase, BlobRef, DeltaRef, PolicyManifest
from bus.process.process_tuning import return_freed_memory
from bus.streams.publish import together
from storage.model_files.adapter_names import WEIGHT, adapter_names, magnitude_name
from storage.weights.array_pool import SpareMemory
from storage.weights.blob_sources import BlobSource
from storage.weights.deltas import Moved, apply_delta
from storage.weights.quantisation import published_as
from storage.weights.tensors import (
    TORCH_DTYPES,
    HostTensor,
    NewWords,
    Weights,
    in_order,
    read_snapshot,
    spare_threads,
)

DTYPES = {name: getattr(torch, dtype) for name, dtype in TORCH_DTYPES.items()}


def torch_tensors(tensors: Mapping[str, HostTensor]) -> dict[str, torch.Tensor]:
    """Return the same memory as tensors, to be read only. Raises `StorageError` for a dtype torch lacks."""
    if unknown := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise StorageError(f"torch has no {', '.join(sorted(unknown))}")
    return {name: torch_tensor(tensor) for name, tensor in tensors.items()}


def torch_tensor(tensor: HostTensor) -> torch.Tensor:
    """Return the same memory as a tensor of a dtype that torch has."""
    words = torch.from_numpy(tensor.words.view(f"i{tensor.words.itemsize}"))
    return words.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


SMALLEST_NORM = 1e-30
"""Rows of zeros stay zeros."""


def merged_weights(
    base: Weights, adapters: Weights, scale: float, threads: Executor | None = None, *,
    like: NewWords = np.empty_like,
) -> Weights:  # fmt: skip
    """Return `base` with W + scale * B A in the place of each W that has an adapter; it shares the others.
    Where adapters have lengths, the rows have these. Their digests are made of those of W and its adapter.
    `like` allocates what is new. Raises `StorageError` for adapters that do not fit the base."""
    adapted = list(_adapted(base, adapters))
    found = in_order(threads, partial(_merged, scale, like), adapted)
    tensors = dict(base.tensors) | {one.name: tensor for one, tensor in zip(adapted, found, strict=True)}
    digests = dict(base.digests) | {one.name: xxh3_128_digest(one.digests) for one in adapted}
    return Weights(adapters.policy_version, tensors, digests)


def beside(base: Weights, adapters: Weights) -> Weights:
    """Return the frozen weights and their adapters, for an engine that adds them itself. Raises
    `StorageError` as `merged_weights` does."""
    deque(_adapted(base, adapters), maxlen=0)
    tensors = {**base.tensors, **adapters.tensors}
    return Weights(adapters.policy_version, tensors, {**base.digests, **adapters.digests})


class _Adapted(NamedTuple):
    name: str
    weight: HostTensor
    a: HostTensor
    b: HostTensor
    magnitude: HostTensor | None
    """Lengths of the rows; None for lengths that W + scale * B A has."""
    digests: bytes


def _adapted(base: Weights, adapters: Weights) -> Iterator[_Adapted]:
    left = set(adapters.tensors)
    for name in base.tensors:
        names = adapter_names(name)
        if name.endswith(WEIGHT) and left.issuperset(names):
            a, b = (adapters.tensors[each] for each in names)
            magnitude = adapters.tensors.get(magnitude_name(name))
            used = names if magnitude is None else (*names, magnitude_name(name))
            left.difference_update(used)
            digests = base.digests[name] + b"".join(adapters.digests[each] for each in used)
            yield _Adapted(name, base.tensors[name], a, b, magnitude, digests)
    if left:
        raise StorageError(
            f"version {adapters.policy_version} has {len(left)} tensors, as {min(left)}, that are adapters "
            "of none of its frozen weights"
        )


@torch.no_grad()
def _merged(scale: float, like: NewWords, one: _Adapted) -> HostTensor:
    """Compute as the learner does (`learner.backends.shared.lora.merged`): in float32, rounded once."""
    weight, a, b = (torch_tensor(each) for each in (one.weight, one.a, one.b))
    if (b.shape[0], a.shape[1]) != tuple(weight.shape) or a.shape[0] != b.shape[1]:
        raise StorageError(
            f"{one.name}: an adapter of {list(b.shape)} and {list(a.shape)} is not of {list(weight.shape)}"
        )
    whole = weight.float() + scale * (b.float() @ a.float())
    if one.magnitude is not None:
        magnitude = torch_tensor(one.magnitude)
        if magnitude.shape != whole.shape[:1]:
            raise StorageError(
                f"{one.name}: {list(magnitude.shape)} lengths of rows are not of {list(weight.shape)}"
            )
        norms = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float32)
        whole = whole * (magnitude / norms.clamp(min=SMALLEST_NORM))[:, None]
    result = HostTensor(one.weight.dtype, one.weight.shape, like(one.weight.words))
    torch_tensor(result).copy_(whole)
    return result


@dataclass(frozen=True)
class _Base:
    digest: str
    weights: Weights


_bases: WeakKeyDictionary[BlobSource, _Base] = WeakKeyDictionary()
"""A process has a source for each policy: rollouts, evaluations and opponents share the base, which is as
large as the model, and so do policies whose bases have the same bytes."""
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def base_weights(
    source: BlobSource, adapted: AdaptedBase, fetch: Callable[[AdaptedBase], Awaitable[Weights]]
) -> Weights:
    """Return the frozen weights, which `fetch` brings unless some source brought the same last. Raises what
    `fetch` raises; then the next call fetches again."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):  # two fetch it once
        held = next((base for base in _bases.values() if base.digest == adapted.identity), None)
        _bases[source] = held or _Base(adapted.identity, await fetch(adapted))
        return _bases[source].weights


log = structlog.get_logger()
T = TypeVar("T")


class Receiver:
    """Holds the newest weights received from one learner, and makes later ones from them. `ConfigError` is
    raised for weights that are quantised in another way than the first: engines were started for those."""

    def __init__(self, blobs: BlobSource, *, served: ServedAdapters | None = None) -> None:
        """Receive from `blobs`. Adapters that are `served` are handed on beside their frozen weights."""
        self.weights: Weights | None = None
        """Weights as they are published: adapters alone, where these are."""
        self._blobs = blobs
        self._served = served
        self.lacks_base = False
        """Whether the frozen weights of adapters could not be had when they were last needed."""
        self._base: tuple[str, Weights] | None = None
        """Frozen weights of the adapters, with their digest."""
        self._incarnation = ""
        self._published_as = ""
        """How the first weights are quantised."""
        self._spare = SpareMemory[Sequence[Moved]]()
        """Memory of earlier versions; engines keep the last of them until they have the next."""

    async def advance(self, manifest: PolicyManifest) -> Weights:
        """Return the weights that `manifest` announces, by deltas from those held or from its snapshot.
        Everything is verified before any of it is visible. Raises `BusError` or `StorageError` when neither
        way works; then the weights held stay. Raises `ConfigError` where engines serve other adapters."""
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
        if self._served is not None:
            self._served.refuse_others(adapted)
        if adapted is None:
            self.lacks_base = False
            return published
        if self._base is None or self._base[0] != adapted.identity:
            self.lacks_base = True
            weights = await base_weights(self._blobs, adapted, self._fetch_base)
            self._base, self.lacks_base = (adapted.identity, weights), False
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

    async def _fetch_base(self, adapted: AdaptedBase) -> Weights:
        data, *rest = await together(map(self._blobs.get, adapted.blobs))
        return await _in_threads(partial(read_snapshot, data, 0, rest=rest))

    async def _from_snapshot(self, manifest: PolicyManifest) -> Weights:
        tail = manifest.since(manifest.snapshot_at) or ()
        data, *rest = await together(map(self._blobs.get, manifest.snapshot_blobs))
        snapshot = await _in_threads(
            partial(read_snapshot, data, manifest.snapshot_at, rest=rest, like=self._spare.like)
        )
        return await self._later(snapshot, tail)

    async def _by_deltas(self, manifest: PolicyManifest) -> Weights | None:
        """Apply deltas to the weights held; return `None` if no unbroken chain starts from them."""
        held = self.weights
        if held is None or self._incarnation != manifest.incarnation:
            return None
        chain = manifest.since(held.policy_version)
        if chain is None:
            return None
        if _size(blob for delta in chain for blob in delta.blobs) > _size(manifest.snapshot_blobs):
            return None
        try:
            return await self._later(held, chain)
        except (BusError, StorageError) as error:
            log.warning("delta_refused", policy_version=manifest.policy_version, reason=str(error))
            return None

    async def _later(self, base: Weights, chain: Sequence[DeltaRef]) -> Weights:
        found = await together(together(map(self._blobs.get, delta.blobs)) for delta in chain)
        for delta, (data, *rest) in zip(chain, found, strict=True):
            base = await _in_threads(
                partial(apply_delta, base, data, rest=rest, note=note, spare=self._spare)
            )
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


def _size(blobs: Iterable[BlobRef]) -> int:
    return sum(blob.size_bytes for blob in blobs)
