"""The memory of a message is known, and bounded, before anything is built of it."""

import asyncio
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from bus import decoded_size
from bus.codec import decode, encode
from bus.connection import Bus
from bus.decoded_size import DENSEST, MemoryLimit
from bus.errors import SchemaError
from bus.evaluation_messages import PromptSet
from bus.messages import DeadLetter, Prompt
from bus.streams.consume import Inbox, consume_batches
from bus.streams.publish import Publisher
from bus.trajectory import Trajectory, TrajectoryBatch, Turn
from tests.bus.example_messages import wire
from tests.factories import make_trajectory

pytestmark = pytest.mark.slow

COUNT = 1 << 17


def listed(item: bytes, count: int = COUNT) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def numbered(pack: bytes, count: int = COUNT) -> bytes:
    """A list of values of four bytes that are all different."""
    values = np.empty(count, dtype=[("pack", "S1"), ("value", ">u4")])
    values["pack"], values["value"] = pack, np.arange(1000, 1000 + count)
    return b"\xdd" + count.to_bytes(4, "big") + values.tobytes()


def dense(count: int) -> dict[str, bytes]:
    """Values that take much more memory than bytes, in MessagePack."""
    return {
        "empty maps": listed(b"\x80", count),
        "empty lists": listed(b"\x90", count),
        "maps in lists": listed(b"\x91\x80", count // 2),
        "maps of one": listed(b"\x81\xa1a\x80", count // 2),
        "one map": msgpack.packb({f"{n:04x}": None for n in range(count // 4)}),
        "lists of lists": listed(b"\xdd\x00\x00\x00\x40" + b"\x90" * 64, count // 64),
        "empty texts": listed(b"\xa0", count),
        "short texts": listed(b"\xa2\x61\x62", count),
        "short bytes": listed(b"\xc4\x02\x61\x62", count),
        "numbers": numbered(b"\xce", count),
        "fractions": numbered(b"\xca", count),
        "long fractions": listed(b"\xcb" + b"\x3f" * 8, count),
        "nothing": listed(b"\xc0", count),
    }


DENSE = dense(COUNT)
FEW = dense(1 << 13)
DEEP = ("empty maps", "one map", "numbers")
"""Values that are tried below lists in lists as well, in each run."""


@pytest.mark.parametrize("values", FEW.values(), ids=FEW)
def test_the_memory_of_values_is_never_more_than_was_added_up(values: bytes):
    memory = memory_of(msgpack.unpackb(values, raw=False), set())
    added_up = decoded_size._built_bytes(values, 1 << 40)
    assert memory <= added_up + 64 <= DENSEST * len(values)  # None itself is not the message's


def memory_of(value: object, seen: set[int]) -> int:
    """Bytes of a value and of all in it."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    within = (
        [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return sys.getsizeof(value) + sum(memory_of(one, seen) for one in within)


@pytest.mark.parametrize(
    ("deep", "values"),
    [
        *(pytest.param(False, values, id=name) for name, values in DENSE.items()),
        *(pytest.param(True, DENSE[name], id=f"deep {name}") for name in DEEP),
    ],
)
def test_a_message_takes_a_small_factor_of_its_size_or_is_refused(deep: bool, values: bytes):
    """What a hostile actor puts into the metadata costs the shard at most 12 times its size, and 8 MiB."""
    inside = b"\x93" * 40 + values + b"\xc0" * 80 if deep else values
    data = with_metadata(inside)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with suppress(SchemaError):
            decode(data, Trajectory)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= MemoryLimit().allowed(len(data)) + len(data)


def with_metadata(value: bytes) -> bytes:
    """A trajectory with this value in its metadata."""
    data = wire(make_trajectory(), metadata={"hole": None})
    return data.replace(b"\xa4hole\xc0", b"\xa4hole" + value)


@pytest.mark.parametrize("dense", [(b"\x80", COUNT), (b"\x90", COUNT), (b"\xa2\x61\x62", 1 << 19)])
def test_what_is_too_dense_is_refused_by_its_memory(dense: tuple[bytes, int]):
    with pytest.raises(SchemaError, match=r"would take more than \d+ bytes of memory: it has too many"):
        decode(with_metadata(listed(*dense)), Trajectory)


@pytest.mark.parametrize(
    "value",
    [b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x03\x05abc", b"\xc8\x00\x01\x05a"],
    ids=["extension", "timestamp", "long extension", "longer extension"],
)
def test_values_of_types_that_no_message_has_are_refused_before_they_are_built(value: bytes):
    with pytest.raises(SchemaError, match="which no message has"):
        decode(with_metadata(listed(value, 1 << 16)), Trajectory)


@pytest.mark.parametrize("cut", [1, 1 << 10, 1 << 16])
def test_a_long_message_that_is_not_whole_is_refused(cut: int):
    data = with_metadata(listed(b"\xa2\x61\x62", 1 << 16))
    with pytest.raises(SchemaError, match="are not MessagePack"):
        decode(data[:-cut], Trajectory)


def test_the_densest_honest_messages_pass():
    """Turns of one token, prompts of one character, trajectories of two tokens: 20,000 of each."""
    turns = tuple(Turn(at, at + 1, "stop", 0.7, 0.9, 50, 0.5) for at in range(4, 20_004))
    game = replace(make_trajectory(tokens=8), **arrays(20_004), turns=turns)
    assert len(decode(encode(game), Trajectory).turns) == 20_000
    short = encode(make_trajectory(tokens=2))[len(b"\x93\xaatrajectory\x02") :]
    head = b"\x93\xactrajectories\x02\x81\xactrajectories"
    batch = decode(head + listed(short, 5_000), TrajectoryBatch)
    assert len(batch.trajectories) == 5_000
    prompts = (Prompt(content=[{"role": "user", "content": "?"}], label="1"),) * 20_000
    assert decode(encode(PromptSet(prompts=prompts)), PromptSet).prompts[-1] == prompts[0]


def arrays(length: int) -> dict[str, np.ndarray]:
    """Arrays of a trajectory whose first four tokens are the prompt."""
    mask = np.arange(length) >= 4
    return {
        "token_ids": np.zeros(length, np.int32),
        "loss_mask": mask,
        "behaviour_logprobs": np.where(mask, -1, 0).astype(np.float32),
        "policy_versions": np.where(mask, 0, -1).astype(np.int32),
    }


@pytest.mark.nats
async def test_a_dense_message_is_set_aside_once_and_no_later_start_meets_it(bus: Bus):
    """It comes in ordinary parts, as the bus allows."""
    hole = with_metadata(listed(b"\x80", 3 << 20))
    batch = b"\x93\xactrajectories\x02\x81\xactrajectories\x91" + hole[len(b"\x93\xaatrajectory\x02") :]
    publisher = Publisher(bus)
    subject = bus.subject("trajectories", 0)
    await publisher.publish(subject, batch, message_id="hole")
    good = encode(TrajectoryBatch(trajectories=(make_trajectory(),)))
    await publisher.publish(subject, good, message_id="good")
    assert await handled(bus, good=1) == 1
    letters = await bus.js.stream_info(bus.topology.stream("DEAD"))
    assert letters.state.messages == 1
    found = await bus.js.get_last_msg(bus.topology.stream("DEAD"), bus.subject("dead", "unreadable"))
    assert "too many of them" in decode(found.data or b"", DeadLetter).reason
    await publisher.publish(subject, good, message_id="better")
    assert await handled(bus, good=1) == 1
    assert (await bus.js.stream_info(bus.topology.stream("DEAD"))).state.messages == 1


async def handled(bus: Bus, *, good: int) -> int:
    """Consume as a shard does until so many messages were handled; return their number."""
    stop, seen = asyncio.Event(), []

    async def take(batches: list[TrajectoryBatch]) -> None:
        seen.extend(batches)
        if len(seen) >= good:
            stop.set()

    inbox = Inbox(bus, "TRAJECTORIES", "shard-0")
    async with asyncio.timeout(60):
        await consume_batches(inbox, bus, TrajectoryBatch, take, stop=stop, limit=4)
    return len(seen)
