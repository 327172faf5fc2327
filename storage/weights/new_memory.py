"""Memory that weights are received into, and stay in: tensors are views of it, and each tensor's pages go
back to the system when nothing refers to that tensor any more.

The C library would keep pieces of some megabytes that one thread after another makes and frees, so that a
process grew with each version that it received."""

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

from storage.disk.atomic_files import Data

Words = NDArray[np.unsignedinteger]


class _Memory(mmap.mmap):
    """Memory of `new_memory`, as against mapped files."""

    lent: list[tuple[int, int]] | None = None
    """While others read all of it: pages that nothing else refers to any more, by their start and size."""

    def free(self, start: int, size: int) -> None:
        if self.lent is None:
            self.madvise(mmap.MADV_DONTNEED, start, size)
        else:
            self.lent.append((start, size))


def new_memory(size_bytes: int) -> memoryview:
    """Return memory to read into, a mapping of its own."""
    mapping = _Memory(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a page at a time, new memory takes longer than what is read into it
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)[:size_bytes]


def copied(data: memoryview) -> memoryview:
    """Return the same bytes in memory of their own."""
    copy = new_memory(len(data))
    copy[:] = data
    return copy


def words_in(data: Data, word: type[np.unsignedinteger], count: int, start: int) -> Words | None:
    """Return `count` words from byte `start` on where they lie; None unless they lie in `new_memory`. Their
    pages go back to the system with the last view of them; no other words may lie there."""
    mapping = data.obj if isinstance(data, memoryview) else None
    if not isinstance(mapping, _Memory):
        return None
    words: Words = np.frombuffer(data, word, count, start)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # pages that others have a part of stay
    whole_pages = (start + words.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if whole_pages > 0:
        weakref.finalize(words, mapping.free, first, whole_pages).atexit = False
    return words


def lend(data: memoryview) -> None:
    """Have memory of `new_memory` keep its contents until `take_back`, though tensors in it may go."""
    mapping = data.obj
    assert isinstance(mapping, _Memory)
    mapping.lent = []


def take_back(data: memoryview) -> None:
    """Return the pages of tensors that went since `lend` to the system."""
    mapping = data.obj
    assert isinstance(mapping, _Memory)
    pages, mapping.lent = mapping.lent or [], None
    for start, size in pages:
        mapping.free(start, size)
