"""Encoding of a delta of weights as bytes.

A delta is `MAGIC`, the length of its header, the header, and one zstd frame for each part of a tensor that
changed. A frame holds the gaps between the positions of changed words, then how far each word moved, as
whole numbers modulo the word. A small update moves most words to a neighbour, so moves take a quarter of the
space of new values. Both are stored in planes, lowest bytes first: the high bytes are nearly all 0, which
zstd finds. The header names the digest of the base and of every result, so that errors cannot accumulate.

Frames may lie in several blobs, of which the first begins with the header; none lies in two."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import zstandard
from numpy.typing import NDArray

from bus.codec import Message, decode, encode
from bus.decoded_size import MemoryLimit
from bus.errors import SchemaError, StorageError
from storage.disk.atomic_files import Data
from storage.weights.tensors import ITEM_BYTES, WORD, Words, part_count, place_of

MAGIC = b"SLUICED2"
LEVEL = 1
GAP_BYTES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartChange(Message, tag="part_change"):
    """One part of a tensor that changed."""

    number: int
    changed: int
    """Number of words in the body."""
    gap_bytes: int
    """Bytes of each gap between their positions; 0 if the body has all words as they are."""
    body_bytes: int
    """Bytes of its zstd frame."""

    def describes(self, words: int) -> bool:
        """Return whether the change can be of a part of so many words."""
        whole = self.gap_bytes == 0 and self.changed == words
        sparse = self.gap_bytes in GAP_BYTES and 0 < self.changed <= words
        return (whole or sparse) and self.body_bytes >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChange(Message, tag="tensor_change"):
    """One tensor that changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartChange, ...]
    """Parts that changed, ascending."""
    digest: bytes
    """Digest of the resulting tensor, by `storage.weights.tensors.whole_digest`."""

    def check(self) -> None:
        """Refuse what cannot describe a tensor."""
        if self.dtype not in ITEM_BYTES or min(self.shape, default=0) < 0:
            raise SchemaError(f"{self.name}: {self.dtype} {list(self.shape)} is no tensor")
        words, itemsize = prod(self.shape), ITEM_BYTES[self.dtype]
        numbers = [change.number for change in self.parts]
        in_range = numbers and min(numbers) >= 0 and max(numbers) < part_count(words, itemsize)
        if not in_range or numbers != sorted(set(numbers)):
            raise SchemaError(f"{self.name}: {self.dtype} {list(self.shape)} has no parts {numbers}")
        for change in self.parts:
            place = place_of(change.number, words, itemsize)
            if not change.describes(place.stop - place.start):
                raise SchemaError(
                    f"{self.name}: {change.changed} changed words with gaps of {change.gap_bytes} bytes "
                    f"are no change of part {change.number} of {self.dtype} {list(self.shape)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaHeader(Message, tag="weight_delta", memory=MemoryLimit(most_bytes=1 << 32)):
    """Base and result of a delta."""

    base_version: int
    policy_version: int
    base_digest: bytes
    digest: bytes
    """`Weights.digest` of the result."""
    removed: tuple[str, ...]
    """Names of tensors that no longer exist."""
    changes: tuple[TensorChange, ...]


def write_delta(header: DeltaHeader, bodies: Iterable[bytes]) -> bytes:
    """Return the encoded delta; `bodies` belong to the parts that the header names, in its order."""
    said = encode(header)
    return b"".join([MAGIC, struct.pack("<I", len(said)), said, *bodies])


def read_delta(data: Data, rest: Sequence[Data] = ()) -> tuple[DeltaHeader, Iterator[memoryview]]:
    """Return the header and the bodies of all its parts, the last of which lie in `rest`. Raises
    `StorageError` for a malformed delta."""
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
    if len({tensor.name for tensor in header.changes}) != len(header.changes):
        raise StorageError("a delta changes one tensor twice")
    sizes = [change.body_bytes for tensor in header.changes for change in tensor.parts]
    blobs = [memoryview(data)[start + length :], *(memoryview(each) for each in rest)]
    bounds, ends = list(accumulate(sizes, initial=0)), list(accumulate(map(len, blobs)))
    if bounds[-1] != ends[-1] or not set(ends) <= set(bounds):
        raise StorageError(f"blobs of {[len(data), *map(len, rest)]} bytes have not a delta's bodies")
    return header, _cut(blobs, sizes)


def _cut(blobs: Sequence[memoryview], sizes: Iterable[int]) -> Iterator[memoryview]:
    left = iter(sizes)
    for blob in blobs:
        at = 0
        while at < len(blob):
            size = next(left)
            yield blob[at : at + size]
            at += size


def pack_whole(words: Words) -> bytes:
    """Return the body of a part with all its words."""
    return _compressed(_planes(words))


def pack_moves(gaps: Words, moves: Words) -> bytes:
    """Return the body of a part from the moves of its changed words, modulo the word, and their gaps."""
    return _compressed(np.concatenate([_planes(gaps), _planes(_zigzag(moves))]))


def unpack_whole(change: PartChange, body: memoryview, word: type[np.unsignedinteger]) -> Words:
    """Return the words of a part. Raises `StorageError` for a body that is damaged or of another size."""
    return _from_planes(_content(change, body, word().itemsize), change.changed, word)


def unpack_moves(change: PartChange, body: memoryview, word: type[np.unsignedinteger]) -> tuple[Words, Words]:
    """Return the gaps and moves of a part. Raises `StorageError` as `unpack_whole` does."""
    content = _content(change, body, word().itemsize)
    moves = _from_planes(content[change.changed * change.gap_bytes :], change.changed, word)
    return _from_planes(content, change.changed, WORD[change.gap_bytes]), _unzigzag(moves)


def _zigzag(moves: Words) -> Words:
    """Map 0, -1, 1, -2, 2, ..., modulo the word, to 0, 1, 2, 3, 4, ..."""
    sign = moves >> (8 * moves.itemsize - 1)
    coded: Words = (moves << 1) ^ np.negative(sign)
    return coded


def _unzigzag(coded: Words) -> Words:
    moves: Words = (coded >> 1) ^ np.negative(coded & 1)
    return moves


def _planes(words: Words) -> NDArray[np.uint8]:
    """Return the lowest byte of each word, then the next byte of each, and so on."""
    order = f"<u{words.itemsize}"
    return words.astype(order, copy=False).view(np.uint8).reshape(-1, words.itemsize).T.ravel()


def _from_planes(planes: NDArray[np.uint8], count: int, word: type[np.unsignedinteger]) -> Words:
    words = planes[:count].astype(word)
    for byte in range(1, words.itemsize):
        words |= planes[byte * count : (byte + 1) * count].astype(word) << word(8 * byte)
    return words


def _compressed(planes: NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)


def _content(change: PartChange, body: memoryview, itemsize: int) -> NDArray[np.uint8]:
    """Return a body's content, whose size is known: a frame that claims another size is not opened."""
    expected = change.changed * (change.gap_bytes + itemsize)
    try:
        size = zstandard.frame_content_size(body)
        if size != expected:
            raise StorageError(f"part {change.number}: a body of {size} bytes, not {expected}")
        content = zstandard.ZstdDecompressor().decompress(body, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise StorageError(f"part {change.number}: the body of its change is damaged: {error}") from error
    return np.frombuffer(content, np.uint8)
