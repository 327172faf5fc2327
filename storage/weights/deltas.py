"""Makes and applies deltas between versions of weights, exact to the bit; `delta_format.py` encodes them.

All work is done in parts of tensors, on threads. numpy, zstd and xxhash release the interpreter lock, but
each call has to take it again, so many small calls would wait for each other."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.errors import StorageError
from storage.disk.atomic_files import Data
from storage.weights.array_pool import SpareMemory
from storage.weights.delta_format import (
    GAP_BYTES,
    DeltaHeader,
    PartChange,
    TensorChange,
    pack_moves,
    pack_whole,
    read_delta,
    unpack_moves,
    unpack_whole,
    write_delta,
)
from storage.weights.tensors import (
    ITEM_BYTES,
    WORD,
    HostTensor,
    Weights,
    Words,
    in_order,
    part_count,
    part_digest,
    part_words,
    place_of,
    whole_digest,
)

Positions = NDArray[np.int64]
MAY_ADD_BYTES = 16 << 20
"""Bytes that a delta may add to weights that are smaller than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An encoded delta and its result."""

    data: bytes
    """The delta, as far as its bodies are here."""
    weights: Weights
    sent_words: int
    """Number of words that were sent: those whose bits differ, and all words of a part that travels whole."""


@dataclass(frozen=True, slots=True)
class EncodedTensors:
    """What a delta has of some tensors."""

    digests: Mapping[str, bytes]
    """Digest of every tensor, changed or not."""
    changes: Mapping[str, TensorChange]
    bodies: Mapping[str, list[bytes]]
    """Bodies of the changed parts of each changed tensor; none where they are stored elsewhere."""

    @property
    def body_bytes(self) -> int:
        """Return the size of all bodies, wherever they are."""
        return sum(part.body_bytes for change in self.changes.values() for part in change.parts)

    @property
    def content(self) -> list[bytes]:
        """Return the bodies in the order of the changes."""
        return [body for name in self.changes for body in self.bodies.get(name, ())]


def encode_tensors(
    base: Weights, tensors: Mapping[str, HostTensor], threads: Executor | None = None, *,
    most_bytes: int = sys.maxsize,
) -> EncodedTensors | None:  # fmt: skip
    """Return what a delta from `base` has of these tensors, which may be some of those of a version. Returns
    None, and stops, as soon as it has more than `most_bytes`."""
    items = [(name, tensor, n) for name, tensor in tensors.items() for n in range(tensor.parts)]
    encoded = in_order(threads, partial(_encoded, base), items)
    digests, changes, bodies = dict[str, bytes](), dict[str, TensorChange](), dict[str, list[bytes]]()
    size_bytes = 0
    for name, tensor in tensors.items():
        parts = list(islice(encoded, tensor.parts))
        digests[name] = whole_digest([part.digest for part in parts])
        changed = tuple(part.change for part in parts if part.change is not None)
        if not changed:
            continue
        bodies[name] = [part.body for part in parts if part.change is not None]
        size_bytes += sum(change.body_bytes for change in changed)
        if size_bytes > most_bytes:
            return None  # and what is not begun yet is cancelled with `encoded`
        changes[name] = TensorChange(
            name=name, dtype=tensor.dtype, shape=tensor.shape, parts=changed, digest=digests[name]
        )
    return EncodedTensors(digests, changes, bodies)


def joined_delta(
    base: Weights, policy_version: int, tensors: Mapping[str, HostTensor],
    encoded: Sequence[EncodedTensors | None], *, most_bytes: int = sys.maxsize,
) -> Delta | None:  # fmt: skip
    """Return the delta that has all these changes, whoever found them: first those that were found first.
    Returns None where there are more than `most_bytes` of them."""
    found = [some for some in encoded if some is not None]
    if len(found) < len(encoded):
        return None
    digests = {name: digest for some in found for name, digest in some.digests.items()}
    changes = tuple(change for some in found for change in some.changes.values())
    weights = Weights(policy_version, tensors, {name: digests[name] for name in tensors})
    header = DeltaHeader(
        base_version=base.policy_version,
        policy_version=policy_version,
        base_digest=base.digest(),
        digest=weights.digest(),
        removed=tuple(sorted(base.tensors.keys() - tensors.keys())),
        changes=changes,
    )
    data = write_delta(header, [body for some in found for body in some.content])
    if len(data) + sum(some.body_bytes for some in found if not some.bodies) > most_bytes:
        return None
    return Delta(data, weights, sum(part.changed for change in changes for part in change.parts))


class Moved(NamedTuple):
    """Changes of one part of a tensor, as a delta describes them."""

    start: int
    """Start of the part, in words."""
    gaps: Words
    """Number of words between each changed word and the one before it, or the start."""
    words: Words
    """New values of the changed words."""

    @property
    def positions(self) -> Positions:
        """Return the positions of the changed words in the tensor."""
        return self.start + _positions(self.gaps)

    @property
    def last(self) -> int:
        """Position of the last changed word in the tensor, if there is one."""
        return self.start + int(self.gaps.sum(dtype=np.int64)) + len(self.gaps) - 1


Note = Callable[[Words, Words, Sequence[Moved]], None]
"""Function that gets a tensor's words before and after, and all its changes in order."""


def apply_delta(
    base: Weights, data: Data, threads: Executor | None = None, *, rest: Sequence[Data] = (),
    note: Note | None = None, spare: SpareMemory[Sequence[Moved]] | None = None,
) -> Weights:  # fmt: skip
    """Apply the delta `data`, which goes on in `rest`, to `base`, which stays as it is; unchanged tensors are
    shared.

    `note` is called for every tensor with changed words, on any of the threads; tensors that `base` has too
    are made in `spare`: where that has the version before `base`, what it lacks is written instead of all.
    It takes no more memory than the changed tensors, and refuses to make `base` more than twice as large.
    Raises `StorageError` when the delta is malformed or for another base, or a result has another digest."""
    header, bodies = read_delta(data, rest)
    if header.base_version != base.policy_version or header.base_digest != base.digest():
        raise StorageError(
            f"a delta from version {header.base_version} ({header.base_digest.hex()}) does not apply to "
            f"version {base.policy_version} ({base.digest().hex()})"
        )
    _refuse_growth(base, header)
    spare = spare or SpareMemory()
    begun = [_begun(base, change, bodies, spare) for change in header.changes]
    parts = in_order(threads, _applied, [(tensor, n) for tensor in begun for n in range(tensor.new.parts)])
    applied = [(tensor, list(islice(parts, tensor.new.parts))) for tensor in begun]
    changed = list(in_order(threads, partial(_finished, note, spare), applied))
    names = [change.name for change in header.changes]
    gone = set(header.removed)
    tensors = {name: tensor for name, tensor in base.tensors.items() if name not in gone}
    tensors |= dict(zip(names, changed, strict=True))
    digests = {name: base.digests[name] for name in tensors if name in base.digests}
    digests |= {change.name: change.digest for change in header.changes}
    result = Weights(header.policy_version, tensors, digests)
    if result.digest() != header.digest:
        raise StorageError(
            f"version {header.policy_version} should have the digest {header.digest.hex()} and has "
            f"{result.digest().hex()}: fetch the snapshot instead"
        )
    return result


def changed_positions(old: Words, new: Words, *, at_most: int) -> Positions | None:
    """Return the positions at which two arrays of equal length differ; `None` if more than `at_most`."""
    found, count = [], 0
    for n in range(part_count(len(new), new.itemsize)):
        place = place_of(n, len(new), new.itemsize)
        found.append(np.flatnonzero(old[place] != new[place]) + place.start)
        count += len(found[-1])
        if count > at_most:
            return None
    return np.concatenate(found)


# --- encoding ---


class _Encoded(NamedTuple):
    digest: bytes
    change: PartChange | None
    """Change of the part; `None` if there is none."""
    body: bytes


def _encoded(base: Weights, item: tuple[str, HostTensor, int]) -> _Encoded:
    name, tensor, number = item
    before, new = base.tensors.get(name), tensor.part(number)
    digest = part_digest(new)
    sparse = _sparse(before.part(number), new) if before is not None and before.same_kind(tensor) else None
    if sparse is None:
        changed, gap_bytes, body = len(new), 0, pack_whole(new)
    else:
        gaps, moves = sparse
        if not len(gaps):
            return _Encoded(digest, None, b"")
        changed, gap_bytes, body = len(gaps), gaps.itemsize, pack_moves(gaps, moves)
    change = PartChange(number=number, changed=changed, gap_bytes=gap_bytes, body_bytes=len(body))
    return _Encoded(digest, change, body)


def _sparse(old: Words, new: Words) -> tuple[Words, Words] | None:
    """Return gaps and moves of the changed words; `None` if all words take less space."""
    positions = np.flatnonzero(old != new)
    if len(positions) > new.nbytes // (GAP_BYTES[0] + new.itemsize):
        return None
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    width = next(width for width in GAP_BYTES if largest < 1 << 8 * width)  # 4 bytes are enough for a part
    if len(positions) * (width + new.itemsize) >= new.nbytes > 0:
        return None
    return gaps.astype(WORD[width]), new[positions] - old[positions]


# --- applying ---


def _refuse_growth(base: Weights, header: DeltaHeader) -> None:
    added = sum(
        prod(change.shape) * ITEM_BYTES[change.dtype]
        for change in header.changes
        if not _fits(base.tensors.get(change.name), change)
    )
    if added > max(base.size_bytes, MAY_ADD_BYTES):
        raise StorageError(f"a delta would add {added} bytes to weights of {base.size_bytes}")


def _fits(old: HostTensor | None, change: TensorChange) -> bool:
    return old is not None and (old.dtype, old.shape) == (change.dtype, change.shape)


class _Begun(NamedTuple):
    name: str
    old: HostTensor
    """The tensor before; for a new tensor, the memory of the result."""
    new: HostTensor
    """Memory of the result."""
    behind: Mapping[int, Moved] | None
    """What that lacks of `old` by number of the part; None where it may lack all."""
    changes: Mapping[int, tuple[PartChange, memoryview]]
    """Changes and bodies by number of the part."""
    digest: bytes
    """Digest that the result must have."""


def _begun(
    base: Weights, change: TensorChange, bodies: Iterator[memoryview], spare: SpareMemory[Sequence[Moved]]
) -> _Begun:
    changes = {part.number: (part, body) for part, body in zip(change.parts, bodies, strict=False)}
    old, behind = base.tensors.get(change.name), None
    if old is not None and _fits(old, change):
        if found := spare.behind(old.words):
            memory, lacks = found
            behind = {moved.start // part_words(old.words.itemsize): moved for moved in lacks}
        else:
            memory = spare.like(old.words)
        new = HostTensor(change.dtype, change.shape, memory)
    else:
        words, word = prod(change.shape), WORD[ITEM_BYTES[change.dtype]]
        all_parts = len(changes) == part_count(words, ITEM_BYTES[change.dtype])
        if not all_parts or any(part.gap_bytes for part in change.parts):
            raise StorageError(
                f"{change.name}: the base has no {change.dtype} {list(change.shape)} to change"
            )
        old = new = HostTensor(change.dtype, change.shape, np.empty(words, word))
    return _Begun(change.name, old, new, behind, changes, change.digest)


class _Applied(NamedTuple):
    digest: bytes
    moved: Moved | None
    """Changes of the part; `None` if it came whole."""


def _applied(item: tuple[_Begun, int]) -> _Applied:
    tensor, number = item
    old, new = tensor.old.part(number), tensor.new.part(number)
    try:
        behind = None if tensor.behind is None else tensor.behind[number]
        moved = _written(tensor.changes.get(number), number, old, new, behind)
    except StorageError as error:
        raise StorageError(f"{tensor.name}: {error}") from error
    return _Applied(part_digest(new), moved)


def _written(
    found: tuple[PartChange, memoryview] | None, number: int, old: Words, new: Words, behind: Moved | None
) -> Moved | None:
    start = number * part_words(new.itemsize)
    if found is None:
        _catch_up(new, old, behind)
        return Moved(start, np.zeros(0, np.uint8), np.zeros(0, new.dtype))  # which keep no tensor
    change, body = found
    if change.gap_bytes == 0:
        new[:] = unpack_whole(change, body, new.dtype.type)
        return None
    gaps, moves = unpack_moves(change, body, new.dtype.type)
    positions = _positions(gaps)
    if positions[-1] >= len(old):
        raise StorageError(f"part {number}: position {positions[-1]} of {len(old)} words")
    _catch_up(new, old, behind)
    words = new[positions] + moves
    new[positions] = words
    return Moved(start, gaps, words)


def _catch_up(new: Words, old: Words, behind: Moved | None) -> None:
    """Give `new` the words of `old`, of which it lacks those in `behind` alone if that is given."""
    if behind is None:
        new[:] = old
    else:
        new[_positions(behind.gaps)] = behind.words


def _positions(gaps: Words) -> Positions:
    return np.cumsum(gaps, dtype=np.int64) + np.arange(len(gaps))


def _finished(
    note: Note | None, spare: SpareMemory[Sequence[Moved]], item: tuple[_Begun, Sequence[_Applied]]
) -> HostTensor:
    tensor, parts = item
    if whole_digest([part.digest for part in parts]) != tensor.digest:
        raise StorageError(f"{tensor.name} has not the digest {tensor.digest.hex()}: the delta is damaged")
    moved = [part.moved for part in parts if part.moved is not None]
    if len(moved) == len(parts):
        spare.differs(tensor.old.words, tensor.new.words, moved)
        if note is not None:
            note(tensor.old.words, tensor.new.words, moved)
    return tensor.new
