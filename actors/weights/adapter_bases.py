"""Frozen weights that published adapters belong to, fetched once for all that read from one source."""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from bus.messages import BlobRef
from storage.weights.blob_sources import BlobSource
from storage.weights.tensors import Weights


class _Base:
    """The base that was fetched last from one source."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.digest = ""
        self.weights: Weights | None = None


_bases: WeakKeyDictionary[BlobSource, _Base] = WeakKeyDictionary()
"""A process has one source: rollouts, evaluations and opponents share the base, which is as large as the
model."""


async def base_weights(
    source: BlobSource, ref: BlobRef, fetch: Callable[[BlobRef], Awaitable[Weights]]
) -> Weights:
    """Return the weights behind `ref`, which `fetch` brings unless their bytes were the last ones fetched.

    Raises what `fetch` raises; then the next call fetches again."""
    base = _bases.setdefault(source, _Base())
    async with base.lock:  # two that want it at the same time fetch it once
        if base.weights is None or base.digest != ref.digest:  # another learner may have the same
            base.weights, base.digest = await fetch(ref), ref.digest
        return base.weights
