"""Frozen weights that published adapters belong to, fetched once for all of a process that want them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from bus.messages import BlobRef
from storage.weights.blob_sources import BlobSource
from storage.weights.tensors import Weights


@dataclass(frozen=True)
class _Base:
    """The base that was fetched last from one source."""

    digest: str
    weights: Weights


_bases: WeakKeyDictionary[BlobSource, _Base] = WeakKeyDictionary()
"""A process has a source for each policy: rollouts, evaluations and opponents share the base, which is as
large as the model, and so do policies whose bases have the same bytes."""
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def base_weights(
    source: BlobSource, ref: BlobRef, fetch: Callable[[BlobRef], Awaitable[Weights]]
) -> Weights:
    """Return the weights behind `ref`, which `fetch` brings unless some source brought the same bytes last.

    Raises what `fetch` raises; then the next call fetches again."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):  # two fetch it once
        held = next((base for base in _bases.values() if base.digest == ref.digest), None)
        _bases[source] = held or _Base(ref.digest, await fetch(ref))
        return _bases[source].weights
