"""A copy of one version's weights in memory that other processes of this host can map."""

import hashlib
import mmap
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.host_memory.copies import page_bytes
from storage.weights.tensors import TORCH_DTYPES, Weights, in_order

Bytes = NDArray[np.uint8]
BUCKET_BYTES = 256 << 20
"""Bytes of tensors that are sent together; the learner's device holds two such buckets at a time."""
PIECE_BYTES = 32 << 20
"""Bytes that one thread copies at a time."""
ALIGNED = 64
_numbers = count()


@dataclass
class WeightBucket:
    """Tensors that are sent together; they lie together."""

    begin: int
    end: int
    """Offsets of its bytes, multiples of `ALIGNED`."""
    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes of each tensor."""
    digests: list[bytes] = field(default_factory=list)
    """SHA-256 of each; empty where nobody asked for them."""

    @property
    def size_bytes(self) -> int:
        """Return the size of all its tensors, with the gaps between them."""
        return self.end - self.begin

    def add(self, name: str, dtype: str, shape: tuple[int, ...], size_bytes: int) -> None:
        """Take in a tensor of so many bytes behind the others."""
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.offsets.append(self.end)
        self.sizes.append(size_bytes)
        self.end += aligned(size_bytes)


class Memory:
    """Memory of the host that others can map, and lock. It goes with this process, whatever ends that."""

    def __init__(self, size_bytes: int) -> None:
        self.number = next(_numbers)
        """Says which memory it is among all of this process."""
        self.size_bytes = size_bytes
        self._file = os.memfd_create("sluice-broadcast")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, size_bytes)
        self.bytes: Bytes = np.frombuffer(mmap.mmap(self._file, size_bytes), np.uint8)

    @property
    def path(self) -> str:
        """Return the path under which a process of this host opens it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"


class SharedCopy:
    """The tensors as they were when they were copied; `buckets` in the order in which they are sent."""

    def __init__(
        self,
        weights: Weights,
        memory: Memory | None = None,
        threads: Executor | None = None,
        *,
        hashed: bool = False,
    ) -> None:
        """Copy the tensors, into `memory` if it is as large, and take their digests if `hashed`."""
        self.policy_version = weights.policy_version
        self.buckets = laid_out(weights)
        size_bytes = page_bytes(self.buckets[-1].end if self.buckets else 0)
        self.memory = memory if memory and memory.size_bytes == size_bytes else Memory(size_bytes)
        for _ in in_order(threads, self._put, self._pieces(weights)):
            pass
        for bucket in self.buckets if hashed else ():
            places = zip(bucket.offsets, bucket.sizes, strict=True)
            bucket.digests.extend(in_order(threads, self._digest, places))

    def taken_together(self) -> Iterator[list[WeightBucket]]:
        """Yield buckets that an engine takes at once: no more than the largest, for which it has room. Each
        request is some 4 ms in which it stands still."""
        largest = max((bucket.size_bytes for bucket in self.buckets), default=0)
        together: list[WeightBucket] = []
        for bucket in self.buckets:
            if together and bucket.end - together[0].begin > largest:
                yield together
                together = []
            together.append(bucket)
        if together:
            yield together

    def where(self) -> dict[str, Any]:
        """Tell `broadcast_process.py` where the tensors are and how much room those under way take. It makes
        more for a larger bucket, and less where there is less to send."""
        return {
            "policy_version": self.policy_version,
            "memory": self.memory.number,
            "file": self.memory.path,
            "staging_bytes": 2 * BUCKET_BYTES,
            "buckets": [
                {
                    "span": [bucket.begin, bucket.end],
                    "tensors": list(zip(bucket.dtypes, bucket.shapes, bucket.offsets, strict=True)),
                }
                for bucket in self.buckets
            ],
        }

    def _pieces(self, weights: Weights) -> Iterator[tuple[int, Bytes]]:
        offsets = (offset for bucket in self.buckets for offset in bucket.offsets)
        for tensor, offset in zip(weights.tensors.values(), offsets, strict=True):
            raw = tensor.words.view(np.uint8)
            for start in range(0, len(raw), PIECE_BYTES):
                yield offset + start, raw[start : start + PIECE_BYTES]

    def _put(self, piece: tuple[int, Bytes]) -> None:
        offset, raw = piece
        self.memory.bytes[offset : offset + len(raw)] = raw

    def _digest(self, place: tuple[int, int]) -> bytes:
        offset, size_bytes = place
        return hashlib.sha256(self.memory.bytes[offset : offset + size_bytes].data).digest()


def laid_out(weights: Weights) -> list[WeightBucket]:
    """Return tensors together as far as they are small, in order; a larger one is alone."""
    buckets: list[WeightBucket] = []
    for name, tensor in weights.tensors.items():
        if not buckets or buckets[-1].size_bytes + aligned(tensor.size_bytes) > BUCKET_BYTES:
            end = buckets[-1].end if buckets else 0
            buckets.append(WeightBucket(end, end))
        buckets[-1].add(name, TORCH_DTYPES[tensor.dtype], tensor.shape, tensor.size_bytes)
    return buckets


def aligned(size_bytes: int) -> int:
    """Return the room that a tensor of so many bytes takes."""
    return -(-size_bytes // ALIGNED) * ALIGNED
