"""Weights of one version on the host: tensors as words that compare bit for bit, digests, and snapshots.

A snapshot is a safetensors file. `storage/weights/deltas.py` holds what changed between two versions."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from math import prod
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.errors import StorageError
from bus.process.host_limits import usable_cores
from storage.disk.atomic_files import Data
from storage.weights.new_memory import words_in

T = TypeVar("T")
U = TypeVar("U")
Words = NDArray[np.unsignedinteger]
Floats = NDArray[np.float32]
NewWords = Callable[[Words], Words]
"""Function that makes an array of the same size and dtype with undefined contents."""
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Element sizes by the names of safetensors."""
TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""torch's names of these dtypes; torch itself is not imported here."""
WORD: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PART_BYTES = 32 << 20
"""Bytes of a part of a tensor, which one thread handles. Digests are taken over parts, so the learner and its
actors must have the same value."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors."""
ALIGNMENT = 64
"""Bytes by whose multiple the tensors of a snapshot begin, so that processors compute fast where they lie."""


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor's elements as unsigned words, so that NaN equals itself and -0.0 is not 0.0."""

    dtype: str
    """Name of the dtype in safetensors, a key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    words: Words
    """[elements], contiguous, of the element's size. It may be shared, so nobody writes into it."""

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def parts(self) -> int:
        return part_count(self.count, ITEM_BYTES[self.dtype])

    def part(self, number: int) -> Words:
        return self.words[place_of(number, len(self.words), self.words.itemsize)]

    def pieces(self) -> Iterator[Data]:
        """Yield the bytes as they are in turn."""
        yield self.words.data

    def same_kind(self, other: "HostTensor") -> bool:
        return self.dtype == other.dtype and self.shape == other.shape


class RemoteTensor(HostTensor):
    """A tensor whose elements another process has, which sends them when they are wanted."""

    __slots__ = ("_read",)
    _read: Callable[[int, int], Data]

    def __init__(self, dtype: str, shape: tuple[int, ...], read: Callable[[int, int], Data]) -> None:
        """`read` returns the bytes from one place to another, and waits for them on the caller's thread."""
        for name, value in (("dtype", dtype), ("shape", shape), ("_read", read)):
            object.__setattr__(self, name, value)

    @property
    def words(self) -> Words:
        """Fetch all elements."""
        return np.frombuffer(self._read(0, self.size_bytes), WORD[ITEM_BYTES[self.dtype]])


def own(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Return the tensors whose elements this process has."""
    return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, RemoteTensor)}


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Tensors of one version by Hugging Face name, each with its digest (`whole_digest`)."""

    policy_version: int
    tensors: Mapping[str, HostTensor]
    digests: Mapping[str, bytes]

    @classmethod
    def of(
        cls, policy_version: int, tensors: Mapping[str, HostTensor], threads: Executor | None = None
    ) -> "Weights":
        """Take the digest of every tensor."""
        parts = [(tensor, number) for tensor in tensors.values() for number in range(tensor.parts)]
        found = in_order(threads, lambda part: part_digest(part[0].part(part[1])), parts)
        digests = {name: whole_digest(list(islice(found, tensor.parts))) for name, tensor in tensors.items()}
        return cls(policy_version, tensors, digests)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def words(self) -> int:
        return sum(tensor.count for tensor in self.tensors.values())

    def digest(self) -> bytes:
        """xxh3-128 of the version and all names, dtypes, shapes and digests: equal for equal weights only."""
        return joined_digest(self.policy_version, self.described())

    def described(self) -> dict[str, bytes]:
        """Return name, dtype, shape and digest of each tensor in one, by name."""
        return {
            name: json.dumps([name, tensor.dtype, tensor.shape]).encode() + self.digests[name]
            for name, tensor in self.tensors.items()
        }

    def changed_since(self, digests: Mapping[str, bytes]) -> dict[str, HostTensor]:
        """Return the tensors whose digest differs from the one in `digests`, or is missing there."""
        return {
            name: tensor for name, tensor in self.tensors.items() if digests.get(name) != self.digests[name]
        }

    def sharing(self, other: "Weights") -> "Weights":
        """Return the same weights, with the tensors of `other` where it has the same ones."""
        tensors = dict(self.tensors)
        for name in tensors.keys() & other.tensors.keys():
            same = self.digests[name] == other.digests[name]
            if same and tensors[name].same_kind(other.tensors[name]):
                tensors[name] = other.tensors[name]
        return Weights(self.policy_version, tensors, self.digests)


def joined_digest(policy_version: int, described: Mapping[str, bytes]) -> bytes:
    """Return the digest of weights that several processes have, from what each says of its tensors."""
    whole = xxhash.xxh3_128(str(policy_version).encode())
    for name in sorted(described):
        whole.update(described[name])
    return whole.digest()


def part_words(itemsize: int) -> int:
    """Return the number of elements of each part of a tensor but the last."""
    return PART_BYTES // itemsize


def part_count(words: int, itemsize: int) -> int:
    """Return the number of parts of so many elements, at least one."""
    return max(1, -(-words // part_words(itemsize)))


def place_of(number: int, words: int, itemsize: int) -> slice:
    """Return the place of a part among so many elements."""
    start = number * part_words(itemsize)
    return slice(start, min(start + part_words(itemsize), words))


def part_digest(words: Words) -> bytes:
    """Return the xxh3-128 of the elements' bytes."""
    return xxhash.xxh3_128_digest(words.data)


def whole_digest(parts: Sequence[bytes]) -> bytes:
    """Return the digest of a tensor from those of its parts; several are hashed together by xxh3-128."""
    return parts[0] if len(parts) == 1 else xxhash.xxh3_128_digest(b"".join(parts))


def in_order(threads: Executor | None, work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """Map in order, on `threads` if there are any: numpy, zstd and xxhash release the interpreter lock."""
    return map(work, items) if threads is None else threads.map(work, items)


def spare_threads() -> int:
    """Return how many threads may work on weights beside the main work: half of the cores, at most 32."""
    return min(32, max(1, usable_cores() // 2))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Place of a tensor's bytes in a file."""

    start: int
    end: int


def laid_out(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, ByteRange]]:
    """Return the header of a safetensors file for tensors of these dtypes and shapes, and their places. The
    widest dtypes come first, so that each tensor is aligned to its element's size."""
    order = sorted(kinds, key=lambda name: (-ITEM_BYTES[kinds[name][0]], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end, offsets = 0, {}
    for name in order:
        dtype, shape = kinds[name]
        offsets[name] = begin, end = end, end + ITEM_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    places = {name: ByteRange(start + begin, start + end) for name, (begin, end) in offsets.items()}
    return struct.pack("<Q", len(text)) + text, places


@dataclass(frozen=True)
class SnapshotContent:
    """All tensors of a version as the content of a safetensors file, read where they lie."""

    beginning: bytes
    tensors: Sequence[HostTensor]
    """Tensors of this process, in the order of the file."""

    def __iter__(self) -> Iterator[Data]:
        yield self.beginning
        for tensor in self.tensors:
            yield from tensor.pieces()


def snapshot_content(weights: Weights) -> SnapshotContent:
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()}
    beginning, places = laid_out(kinds, {"policy_version": str(weights.policy_version)})
    return SnapshotContent(beginning, [weights.tensors[name] for name in places])


def read_snapshot(
    data: Data, policy_version: int, threads: Executor | None = None, *, rest: Sequence[Data] = (),
    like: NewWords = np.empty_like,
) -> Weights:  # fmt: skip
    """Read the tensors of safetensors files, of which one has what the others lack: they stay where they are
    in memory of `new_memory`, and go from other data into memory that `like` allocates.

    Raises `StorageError` when one is malformed, or two have a tensor of one name."""
    tensors: dict[str, HostTensor] = {}
    for each in (data, *rest):
        found = _tensors_in(each, threads, like)
        if twice := tensors.keys() & found.keys():
            raise StorageError(f"two files of a snapshot have {min(twice)}")
        tensors |= found
    return Weights.of(policy_version, tensors, threads)


def _tensors_in(data: Data, threads: Executor | None, like: NewWords) -> dict[str, HostTensor]:
    try:
        [length] = struct.unpack_from("<Q", data)
        if length > min(MAX_HEADER_BYTES, len(data)):
            raise StorageError(f"a snapshot of {len(data)} bytes cannot have a header of {length}")
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        _refuse_overlap(header)
        copies = in_order(threads, partial(_tensor, data, 8 + length, like), header.values())
        return dict(zip(header, copies, strict=True))
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"these {len(data)} bytes are no safetensors file: {error!r}") from error


def _refuse_overlap(header: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    places = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    for (_, end), (begin, _) in pairwise(places):
        if begin < end:
            raise ValueError(f"two tensors have the byte {begin}")


def _tensor(data: Data, start: int, like: NewWords, entry: Mapping[str, object]) -> HostTensor:
    dtype, shape, offsets = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
    sizes, (begin, end) = whole_numbers(shape), whole_numbers(offsets)
    if end - begin != prod(sizes) * ITEM_BYTES[dtype] or start + end > len(data):
        raise ValueError(f"{dtype} {list(sizes)} at {begin} to {end} of {len(data) - start} bytes")
    word, count = WORD[ITEM_BYTES[dtype]], prod(sizes)
    in_place = words_in(data, word, count, start + begin)
    if in_place is not None:
        return HostTensor(dtype, sizes, in_place)
    words = np.frombuffer(data, word, count, start + begin)
    copy = like(words)
    copy[:] = words
    return HostTensor(dtype, sizes, copy)


def whole_numbers(value: object) -> tuple[int, ...]:
    """Return `value` as sizes. Raises `ValueError` when it is no list of integers from 0 on."""
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} are no sizes")
    return tuple(value)


def widened(words: Words, dtype: str) -> Floats:
    """Return the values of words of a dtype in safetensors as float32. Raises `StorageError` for others."""
    if dtype == "BF16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    raise StorageError(f"weights of {dtype} cannot be quantised: BF16, F16 and F32 can")


def narrowed(values: Floats, dtype: str) -> Words:
    """Undo `widened`, of finite values. Raises `StorageError` for other dtypes."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    raise StorageError(f"weights of {dtype} cannot be quantised: BF16, F16 and F32 can")
