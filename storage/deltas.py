"""What changed between two versions of the weights, exact to the bit.

A delta is `MAGIC`, the length of its header, the header, and one zstd frame for each tensor that changed: the
gaps between the positions of changed words, then how far each word moved, as whole numbers modulo the word:
a small update moves most of them to a neighbour, which takes a quarter of the space of new values. Both lie
in planes, lowest bytes first: the high bytes are nearly all 0, and zstd finds that. The header names the
digest of what it applies to and of every result, so that nothing drifts.
"""

import struct
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from bus.codec import Message, decode, encode
from bus.errors import SchemaError, StorageError
from storage.weights import (
    ITEM_BYTES,
    WORD,
    HostTensor,
    NewWords,
    Weights,
    Words,
    in_order,
    largest_first,
)

Positions = NDArray[np.int64]
MAGIC = b"SLUICED1"
LEVEL = 1
BLOCK_WORDS = 1 << 20
"""Compared, moved and hashed at a time, so that they come from memory once."""
GAP_BYTES = (1, 2, 4)
MAY_ADD_BYTES = 16 << 20
"""What a delta may add to weights that are smaller than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChange(Message, tag="tensor_change"):
    """One tensor that is not what it was."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    changed: int
    """Words that follow."""
    gap_bytes: int
    """Of each gap between their positions; 0 when all words follow as they are, whatever the base."""
    body_bytes: int
    """Of its zstd frame."""
    digest: bytes
    """xxh3-128 of the resulting words."""

    def check(self) -> None:
        """Refuse what cannot describe a tensor."""
        words = prod(self.shape)
        whole = self.gap_bytes == 0 and self.changed == words
        sparse = self.gap_bytes in GAP_BYTES and 0 < self.changed <= words
        if self.dtype not in ITEM_BYTES or min(self.shape, default=0) < 0 or not (whole or sparse):
            raise SchemaError(
                f"{self.name}: {self.changed} changed words with gaps of {self.gap_bytes} bytes "
                f"are no change of {self.dtype} {list(self.shape)}"
            )
        if self.body_bytes < 0:
            raise SchemaError(f"{self.name}: a body of {self.body_bytes} bytes")

    @property
    def content_bytes(self) -> int:
        """Of its body before compression."""
        return self.changed * (self.gap_bytes + ITEM_BYTES[self.dtype])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeader(Message, tag="weight_delta"):
    """What a delta applies to, and what comes of it."""

    base_version: int
    policy_version: int
    base_digest: bytes
    digest: bytes
    """`Weights.digest` of the result."""
    removed: tuple[str, ...]
    """Tensors that are no more."""
    changes: tuple[TensorChange, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An encoded delta and what it leads to."""

    data: bytes
    weights: Weights
    sent_words: int
    """Those whose bits differ, and all of a tensor that travels whole."""


def encode_delta(
    base: Weights, policy_version: int, tensors: Mapping[str, HostTensor], threads: Executor | None = None
) -> Delta:
    """What makes `tensors` out of `base`. What did not change takes no space at all."""
    work, items = partial(_encoded, base), largest_first(tensors, lambda tensor: tensor.words.nbytes)
    encoded = [found for found in in_order(threads, work, items) if found is not None]
    changes = tuple(change for change, _ in encoded)
    digests = {name: base.digests[name] for name in tensors if name in base.digests}
    digests |= {change.name: change.digest for change in changes}
    weights = Weights(policy_version, tensors, digests)
    header = encode(
        DeltaHeader(
            base_version=base.policy_version,
            policy_version=policy_version,
            base_digest=base.digest(),
            digest=weights.digest(),
            removed=tuple(sorted(base.tensors.keys() - tensors.keys())),
            changes=changes,
        )
    )
    data = b"".join([MAGIC, struct.pack("<I", len(header)), header, *(body for _, body in encoded)])
    return Delta(data, weights, sum(change.changed for change in changes))


Note = Callable[[Words, Words, Words, Words], None]
"""Is told of a tensor the words before and after, the gaps between those that changed, and these alone."""


def apply_delta(
    base: Weights, data: bytes | bytearray, threads: Executor | None = None, *,
    note: Note | None = None, like: NewWords = np.empty_like,
) -> Weights:  # fmt: skip
    """What `data` makes of `base`, which stays as it is; tensors that did not change are shared.

    `note` is told of every tensor of which some words changed, and `like` makes room, on any of the threads.
    Takes no more memory than the tensors that changed, and refuses to make `base` more than twice as large.
    Raises `StorageError` when the delta is malformed or for another base, or a result has another digest.
    """
    header, bodies = _parsed(data)
    if header.base_version != base.policy_version or header.base_digest != base.digest():
        raise StorageError(
            f"a delta from version {header.base_version} ({header.base_digest.hex()}) does not apply to "
            f"version {base.policy_version} ({base.digest().hex()})"
        )
    _refuse_growth(base, header)
    work, items = partial(_applied, base, note, like), zip(header.changes, bodies, strict=True)
    changed = list(in_order(threads, work, items))
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
            f"{result.digest().hex()}: fetch the anchor instead"
        )
    return result


def changed_positions(old: Words, new: Words, *, at_most: int) -> Positions | None:
    """Where two arrays of equally many words differ, ascending; `None` if at more than `at_most`."""
    found, count = [np.zeros(0, np.int64)], 0
    for block in _blocks(new):
        found.append(np.flatnonzero(old[block] != new[block]) + block.start)
        count += len(found[-1])
        if count > at_most:
            return None
    return np.concatenate(found)


# --- encoding ---


def _encoded(base: Weights, item: tuple[str, HostTensor]) -> tuple[TensorChange, bytes] | None:
    """The change of one tensor and its body, `None` when it did not change."""
    name, new = item
    old = base.tensors.get(name)
    sparse = _sparse(old.words, new.words) if old is not None and old.same_kind(new) else None
    gaps, words, digest = sparse or (None, new.words, new.digest())
    if gaps is not None and not len(gaps):
        return None
    gap_bytes = 0 if gaps is None else gaps.itemsize
    planes = [_planes(found) for found in (gaps, words) if found is not None]
    body = zstandard.ZstdCompressor(level=LEVEL).compress(np.concatenate(planes).data)
    change = TensorChange(
        name=name,
        dtype=new.dtype,
        shape=new.shape,
        changed=len(words),
        gap_bytes=gap_bytes,
        body_bytes=len(body),
        digest=digest,
    )
    return change, body


def _sparse(old: Words, new: Words) -> tuple[Words, Words, bytes] | None:
    """The gaps between changed words, how far each moved, and the digest of `new`.

    `None` where all words take less space."""
    compared = _compared(old, new, at_most=new.nbytes // (GAP_BYTES[0] + new.itemsize))
    if compared is None:
        return None
    positions, moves, digest = compared
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max(initial=0))
    width = next((width for width in GAP_BYTES if largest < 1 << 8 * width), None)
    if width is None or len(positions) * (width + new.itemsize) >= new.nbytes > 0:
        return None
    return gaps.astype(WORD[width]), _zigzag(moves), digest


def _compared(old: Words, new: Words, *, at_most: int) -> tuple[Positions, Words, bytes] | None:
    """As `changed_positions`, and how far the words there moved, and the digest of `new`."""
    found, moves, digest, count = [np.zeros(0, np.int64)], [new[:0]], xxhash.xxh3_128(), 0
    for block in _blocks(new):
        before, now = old[block], new[block]
        digest.update(now.data)
        at = np.flatnonzero(before != now)
        moves.append(now[at] - before[at])
        found.append(at + block.start)
        count += len(at)
        if count > at_most:
            return None
    return np.concatenate(found), np.concatenate(moves), digest.digest()


def _blocks(words: Words) -> list[slice]:
    return [slice(start, start + BLOCK_WORDS) for start in range(0, len(words), BLOCK_WORDS)]


def _zigzag(moves: Words) -> Words:
    """0, -1, 1, -2, 2, ..., modulo the word, as 0, 1, 2, 3, 4, ..."""
    sign = moves >> (8 * moves.itemsize - 1)
    coded: Words = (moves << 1) ^ np.negative(sign)
    return coded


def _unzigzag(coded: Words) -> Words:
    moves: Words = (coded >> 1) ^ np.negative(coded & 1)
    return moves


def _planes(words: Words) -> NDArray[np.uint8]:
    """The lowest byte of each word, then the next byte of each, and so on."""
    order = f"<u{words.itemsize}"
    return words.astype(order, copy=False).view(np.uint8).reshape(-1, words.itemsize).T.ravel()


# --- decoding ---


def _parsed(data: bytes | bytearray) -> tuple[DeltaHeader, list[memoryview]]:
    """The header, and the body of each change."""
    start = len(MAGIC) + 4
    if len(data) < start or data[: len(MAGIC)] != MAGIC:
        raise StorageError(f"these {len(data)} bytes are no delta of weights")
    [length] = struct.unpack_from("<I", data, len(MAGIC))
    if start + length > len(data):
        raise StorageError(f"a delta of {len(data)} bytes cannot have a header of {length}")
    try:
        header = decode(bytes(data[start : start + length]), DeltaHeader)
    except SchemaError as error:
        raise StorageError(f"the header of a delta is malformed: {error}") from error
    if start + length + sum(change.body_bytes for change in header.changes) != len(data):
        raise StorageError(f"a delta of {len(data)} bytes has not the bodies that its header names")
    if len({change.name for change in header.changes}) != len(header.changes):
        raise StorageError("a delta changes one tensor twice")
    bodies, position = [], start + length
    for change in header.changes:
        bodies.append(memoryview(data)[position : position + change.body_bytes])
        position += change.body_bytes
    return header, bodies


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


def _applied(
    base: Weights, note: Note | None, like: NewWords, item: tuple[TensorChange, memoryview]
) -> HostTensor:
    change, body = item
    content = _decompressed(change, body)
    word = WORD[ITEM_BYTES[change.dtype]]
    words = _joined(content[change.changed * change.gap_bytes :], change.changed, word)
    if change.gap_bytes == 0:
        whole = HostTensor(change.dtype, change.shape, words)
        _check_digest(whole.digest(), change)
        return whole
    old = base.tensors.get(change.name)
    if old is None or not _fits(old, change):
        raise StorageError(f"{change.name}: the base has no {change.dtype} {list(change.shape)} to change")
    gaps = _joined(content, change.changed, WORD[change.gap_bytes])
    positions = np.cumsum(gaps, dtype=np.int64) + np.arange(change.changed)
    if positions[-1] >= len(old.words):
        raise StorageError(f"{change.name}: position {positions[-1]} of {len(old.words)} words")
    new = like(old.words)
    moved, digest = _move(old.words, positions, _unzigzag(words), new)
    _check_digest(digest, change)
    if note is not None:
        note(old.words, new, gaps, moved)
    return HostTensor(change.dtype, change.shape, new)


def _check_digest(digest: bytes, change: TensorChange) -> None:
    if digest != change.digest:
        raise StorageError(f"{change.name} has not the digest {change.digest.hex()}: the delta is damaged")


def _move(old: Words, positions: Positions, moves: Words, new: Words) -> tuple[Words, bytes]:
    """Write into `new` the words of `old`, some of them moved; return these, and the digest of `new`."""
    moved, digest, blocks = np.empty_like(moves), xxhash.xxh3_128(), _blocks(old)
    ends = np.searchsorted(positions, [block.stop for block in blocks])
    first = 0
    for block, end in zip(blocks, ends, strict=True):
        words, at = new[block], positions[first:end] - block.start
        words[:] = old[block]
        words[at] += moves[first:end]
        moved[first:end] = words[at]
        digest.update(words.data)
        first = end
    return moved, digest.digest()


def _decompressed(change: TensorChange, body: memoryview) -> NDArray[np.uint8]:
    """The body's content, whose size is known beforehand: a frame that claims another is not opened."""
    try:
        size = zstandard.frame_content_size(body)
        if size != change.content_bytes:
            raise StorageError(f"{change.name}: a body of {size} bytes, not {change.content_bytes}")
        content = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise StorageError(f"{change.name}: the body of its change is damaged: {error}") from error
    return np.frombuffer(content, np.uint8)


def _joined(planes: NDArray[np.uint8], count: int, word: type[np.unsignedinteger]) -> Words:
    """`count` words from their planes, which `planes` begins with."""
    words = planes[:count].astype(word)
    for byte in range(1, words.itemsize):
        words |= planes[byte * count : (byte + 1) * count].astype(word) << word(8 * byte)
    return words
