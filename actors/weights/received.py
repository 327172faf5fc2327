"""Weights on their way in: anchors and deltas become the newest version on the host, verified."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog
import torch

from actors.engines.sglang.differences import note
from bus.errors import BusError, StorageError
from bus.messages import DeltaRef, PolicyManifest
from bus.publish import together
from storage.weights.array_pool import SpareMemory
from storage.weights.blob_sources import BlobSource
from storage.weights.deltas import apply_delta
from storage.weights.tensors import TORCH_DTYPES, HostTensor, Weights, read_snapshot, spare_threads

log = structlog.get_logger()
T = TypeVar("T")
DTYPES = {name: getattr(torch, dtype) for name, dtype in TORCH_DTYPES.items()}


class Receiver:
    """Holds the newest weights of one learner that could be had, and makes later ones of them."""

    def __init__(self, blobs: BlobSource) -> None:
        self.weights: Weights | None = None
        self._blobs = blobs
        self._incarnation = ""
        self._spare = SpareMemory()
        """What the versions before were in: engines keep the last of them until they have the next."""

    async def advance(self, manifest: PolicyManifest) -> Weights:
        """The weights that `manifest` announces: from those held where deltas lead there, or from its anchor.

        All of it is verified before any of it is visible. Raises `BusError` or `StorageError` when neither
        way leads there; what was held stays.
        """
        try:
            weights = await self._by_deltas(manifest) or await self.anchored(manifest)
        finally:
            self._spare.trim()  # of a version more, or of other tensors
        if self.weights is not None:  # what did not change stays where it is: engines have it from there
            weights = weights.sharing(self.weights)
        self.weights, self._incarnation = weights, manifest.incarnation
        return weights

    async def anchored(self, manifest: PolicyManifest) -> Weights:
        """The weights that `manifest` announces, from its anchor. Raises as `advance` does."""
        tail = manifest.since(manifest.anchored_at) or ()
        data = await self._blobs.get(manifest.snapshot)
        anchor = await _in_threads(partial(read_snapshot, data, manifest.anchored_at, like=self._spare.like))
        return await self._later(anchor, tail)

    async def _by_deltas(self, manifest: PolicyManifest) -> Weights | None:
        """From the weights held; `None` when no chain of deltas leads on from them, or it is broken."""
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


def torch_tensors(tensors: Mapping[str, HostTensor]) -> dict[str, torch.Tensor]:
    """The same memory as tensors, not to be written into. Raises `StorageError` for a dtype torch lacks."""
    if unknown := {tensor.dtype for tensor in tensors.values()} - DTYPES.keys():
        raise StorageError(f"torch has no {', '.join(sorted(unknown))}")
    return {
        name: torch.from_numpy(tensor.words.view(f"i{tensor.words.itemsize}"))
        .view(DTYPES[tensor.dtype])
        .reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


async def _in_threads(work: Callable[[Executor], T]) -> T:
    """The result of `work`, beside the event loop, with threads to share it among."""

    def working() -> T:
        with ThreadPoolExecutor(spare_threads(), "weights") as threads:
            return work(threads)

    return await asyncio.to_thread(working)


def _size(chain: Sequence[DeltaRef]) -> int:
    return sum(delta.blob.size_bytes for delta in chain)
