"""Hostile inputs by the million: only `SchemaError` leaves `decode`; memory stays in proportion."""

import itertools
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields

import msgpack
import numpy as np
import pytest

from bus.codec import decode, encode
from bus.connection.status import peak_rss_bytes
from bus.errors import SchemaError
from tests.bus.example_messages import CLASSES, EXAMPLES

ROUND = 1000
EXPANSION = 128
"""Bytes allocated for a byte of input: an empty map is one byte on the wire and 88 in Python."""
SMALL_BYTES = 256 << 10

VALID = [encode(example) for example in EXAMPLES]
VALUES = [
    *map(
        msgpack.packb,
        (None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, math.nan, math.inf),
    ),
    *map(msgpack.packb, ("", "x", "stop", "é\U0001f600" * 9, "y" * 300, b"", b"\0", b"\1" * 8, b"\xff" * 32)),
    *map(msgpack.packb, ([], [1, "a", None], [[[]]], [{}] * 20, {}, {"a": 1}, {"a": {"b": [None]}})),
    *map(msgpack.packb, (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), [[0] * 40] * 40)),
    *(msgpack.unpackb(data)[2] and msgpack.packb(msgpack.unpackb(data)[2]) for data in VALID[:6]),
    *(b"\xa2\xff\xfe", b"\xd9\x02\xc3\x28", b"\xd6\xff\0\0\0\0", b"\xc7\x0c\xff" + b"\xff" * 12, b"\xc1"),
    *(b"\x91" * 70 + b"\xc0", b"\x91" * 600 + b"\xc0", b"\x81\xa1a" * 90 + b"\xc0", b"\x81\x90\xc0"),
    *(
        b"\xdd\xff\xff\xff\xff",
        b"\xdd\x00\x0f\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\xde\xff\xff",
    ),
    *(b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05", b"\xc5\xff\xff"),
]
NAMES = {cls: [msgpack.packb(field.name) for field in fields(cls)] for cls in CLASSES}


def mutations(chance: np.random.Generator, count: int) -> Iterator[bytes]:
    """Valid messages with one to four bytes flipped, replaced, removed, repeated, or another's end."""
    which = chance.integers(0, len(VALID), count).tolist()
    changes = chance.integers(1, 5, count).tolist()
    kinds = chance.integers(0, 6, 4 * count).tolist()
    places = chance.random(4 * count).tolist()
    values = chance.integers(0, 256, 4 * count).tolist()
    n = 0
    for source, change in zip(which, changes, strict=True):
        data = bytearray(VALID[source])
        for _ in range(change):
            kind, value, at = kinds[n], values[n], int(places[n] * len(data))
            n += 1
            if kind == 0:
                data[at : at + 1] = bytes([data[at] ^ 1 << value % 8]) if data else b"\0"
            elif kind == 1:
                data[at : at + 1] = bytes([value])
            elif kind == 2:
                del data[at : at + value % 16]
            elif kind == 3:
                data[at:at] = data[at : at + value]
            elif kind == 4:
                data[at:at] = VALUES[value % len(VALUES)]
            else:
                data[at:] = VALID[value % len(VALID)][-(value // 4) :]
        yield bytes(data)


def structures(chance: np.random.Generator, count: int) -> Iterator[bytes]:
    """Messages of the right outline, with some of their fields, and any values in them."""
    classes = chance.integers(0, len(CLASSES), count).tolist()
    picks = iter(chance.integers(0, len(VALUES), 20 * count).tolist())
    dice = iter(chance.integers(0, 20, count).tolist())
    for number, die in zip(classes, dice, strict=True):
        cls = CLASSES[number]
        names = NAMES[cls] if die else [*NAMES[cls][:-1], b"\xc4\x01a"]
        version = VALUES[next(picks)] if die == 1 else b"\x01"
        body = b"".join(name + VALUES[next(picks)] for name in names)
        header = b"\xde" + len(names).to_bytes(2, "big")
        yield b"\x93" + msgpack.packb(cls.tag) + version + header + body


def noise(chance: np.random.Generator, count: int) -> Iterator[bytes]:
    """Random bytes, half of them behind the beginning of a message."""
    lengths = chance.integers(0, 64, count).tolist()
    raw = chance.bytes(64 * count)
    for n, length in enumerate(lengths):
        yield (b"\x93", b"")[n % 2] + raw[64 * n : 64 * n + length]


def rounds(seed: int, inputs: int) -> Iterator[bytes]:
    """About half mutations, a third structures, the rest noise."""
    chance = np.random.default_rng(seed)
    for _ in range(inputs // ROUND):
        yield from itertools.chain(
            mutations(chance, ROUND * 5 // 10),
            structures(chance, ROUND * 4 // 10),
            noise(chance, ROUND // 10),
        )


def accepts(data: bytes) -> bool:
    try:
        decode(data, *CLASSES)
    except SchemaError:
        return False
    return True


def peak_of(data: bytes) -> int:
    """Bytes that `decode` had allocated at most."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    accepts(data)
    return tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize(
    "inputs",
    [pytest.param(60_000, marks=pytest.mark.slow), pytest.param(2_000_000, marks=pytest.mark.nightly)],
)
def test_hostile_inputs_raise_nothing_but_schema_errors(inputs: int):
    sum(map(accepts, rounds(0, 10 * ROUND)))  # what is made once
    before = peak_rss_bytes()
    accepted = sum(map(accepts, rounds(1, inputs)))
    assert 0 < accepted < inputs / 2
    assert peak_rss_bytes() - before < 64 << 20


@pytest.mark.slow
def test_no_hostile_input_allocates_out_of_proportion():
    tracemalloc.start()
    try:
        for data in rounds(2, 15_000):
            assert peak_of(data) <= EXPANSION * len(data) + SMALL_BYTES, data[:200]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x10\x00\x00" * 1000,  # each list takes 8 MiB by its length alone
        b"\xdd\x00\x10\x00\x00" * 300 + b"\xc0" * (1 << 17),
        b"\x93\xa6prompt\x01\x81\xa8metadata\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x80" * (1 << 16),
        b"\x93\xa6prompt\x01\x81\xa8metadata\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x81\xa0\xc0" * (1 << 16),
        b"\x93\xa6prompt\x01\x81\xa8metadata\x81\xa1a\xdd\x00\x01\x00\x00" + b"\x90" * (1 << 16),
        b"\x93\xacread_request\x01\x81\xa9lease_ids\xdd\x00\x01\x00\x00" + b"\x01" * (1 << 16),
        b"\x93\xaaprompt_set\x01\x81\xa7prompts\xdd\x00\x01\x00\x00" + b"\x80" * (1 << 16),
        b"\x93\xd9\x30" + b"x" * 48 + b"\xdf\x00\x10\x00\x00" * 200 + b"\xc0" * (1 << 20),
        b"\x93\xa6prompt\x01\x81\xa7content\xdb\x00\x10\x00\x00"
        + b"x" * ((1 << 20) - 4)
        + "\U0001f600".encode(),
    ],
)
def test_bombs_allocate_in_proportion_to_their_size(data: bytes):
    tracemalloc.start()
    try:
        assert peak_of(data) <= EXPANSION * len(data) + SMALL_BYTES
    finally:
        tracemalloc.stop()
