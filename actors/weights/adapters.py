"""Makes weights for engines of frozen ones and their low-rank adapters (arXiv:2106.09685), with lengths of
rows of their own (arXiv:2402.09353) or without: whole ones, which any engine takes, or both side by side."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from xxhash import xxh3_128_digest

from actors.weights.torch_tensors import torch_tensor
from bus.errors import StorageError
from bus.messages import BlobRef
from storage.model_files.adapter_names import WEIGHT, adapter_names, magnitude_name
from storage.weights.blob_sources import BlobSource
from storage.weights.tensors import HostTensor, NewWords, Weights, in_order

SMALLEST_NORM = 1e-30
"""Rows of zeros stay zeros."""


def merged_weights(
    base: Weights, adapters: Weights, scale: float, threads: Executor | None = None, *,
    like: NewWords = np.empty_like,
) -> Weights:  # fmt: skip
    """Return `base` with W + scale * B A in the place of each W that has an adapter; it shares the others.
    Where adapters have lengths, the rows have these.

    Their digests are made of those of W and its adapter. `like` allocates what is new. Raises `StorageError`
    for adapters that do not fit the base.
    """
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
    """A frozen weight and its adapter."""

    name: str
    weight: HostTensor
    a: HostTensor
    b: HostTensor
    magnitude: HostTensor | None
    """Lengths of the rows; None for those that W + scale * B A has."""
    digests: bytes
    """Those of all of them."""


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
