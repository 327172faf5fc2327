"""Messages that travel in parts: whole again whatever happens to parts, publisher, server and consumer."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from bus.codec import Int32Array, Message, decode, encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError, SchemaError
from bus.messages import BlobRef, DeadLetter, PolicyManifest
from bus.server.nats_server import MAX_PAYLOAD, NatsServer
from bus.streams import consume as consume_module
from bus.streams import message_parts as parts_module
from bus.streams import received as received_module
from bus.streams.consume import Inbox, consume, consume_batches
from bus.streams.message_parts import PART_BYTES, SET, Parts, split
from bus.streams.publish import Publisher
from bus.streams.received import Received
from bus.topology import ensure
from tests.conftest import RUN, Connect

PART = 1000
"""Bytes of a part in the tests that need not be large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed(Message, tag="test_routed"):
    """A trajectory with the experts that each token took."""

    name: str
    token_ids: Int32Array
    routing: bytes = b""


def make(name: str, size: int = 3 * PART, seed: int = 0) -> Routed:
    chance = np.random.default_rng([seed, *name.encode()])
    return Routed(name=name, token_ids=np.arange(5, dtype=np.int32), routing=chance.bytes(size))


class Recorder:
    """A handler that keeps what it got, and stops the loop at the `until`-th."""

    def __init__(self, until: int = 1) -> None:
        self.got: list[Routed] = []
        self.stop = asyncio.Event()
        self._until = until

    async def __call__(self, message: Routed) -> None:
        await self.take([message])

    async def take(self, messages: list[Routed]) -> None:
        self.got += messages
        if len(self.got) >= self._until:
            self.stop.set()

    @property
    def names(self) -> list[str]:
        return sorted(message.name for message in self.got)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_module, "POLL_S", 0.1)
    monkeypatch.setattr(parts_module, "ACK_WAIT_S", 0.8)
    monkeypatch.setattr(received_module, "ACK_WAIT_S", 0.6)
    monkeypatch.setattr(parts_module, "LONGEST_DELAY_S", 0.2)
    monkeypatch.setattr(parts_module, "STALLED_S", 0.5)


@pytest.fixture
async def bus(bus: Bus) -> Bus:
    """The consumer of shard 0 redelivers soon."""
    name = bus.topology.stream("TRAJECTORIES")
    config = dict(bus.topology.consumers(1))["TRAJECTORIES"]
    await bus.js.delete_consumer(name, "shard-0")
    await bus.js.add_consumer(name, config.evolve(ack_wait=0.8))
    return bus


def inbox_of(bus: Bus, parts: Parts | None = None) -> Inbox:
    return Inbox(bus, "TRAJECTORIES", "shard-0", parts)


def pieces(message: Routed, part_bytes: int = PART) -> list[tuple[dict[str, str], bytes]]:
    return list(split(encode(message), message.name, part_bytes))


async def send(bus: Bus, *parts: tuple[dict[str, str], bytes]) -> None:
    for headers, data in parts:
        await bus.js.publish(bus.subject("trajectories", 0), data, headers=headers)


async def run(bus: Bus, recorder: Recorder, inbox: Inbox | None = None, *, batches: bool = False) -> None:
    inbox, stop = inbox or inbox_of(bus), recorder.stop
    async with asyncio.timeout(60):
        if batches:
            await consume_batches(inbox, bus, Routed, recorder.take, stop=stop, limit=7)
        else:
            await consume(inbox, bus, Routed, recorder, stop=stop, concurrency=3)


async def left(bus: Bus, count: int, stream: str = "TRAJECTORIES") -> bool:
    """Tell whether the stream comes to hold so many messages."""
    try:
        async with asyncio.timeout(60):
            while (await bus.js.stream_info(bus.topology.stream(stream))).state.messages != count:
                pass
    except TimeoutError:
        return False
    return True


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what no event tells of, seen at once; the caller has the timeout."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def letter(bus: Bus) -> DeadLetter:
    found = await bus.js.get_last_msg(bus.topology.stream("DEAD"), bus.subject("dead", "unreadable"))
    return decode(found.data or b"", DeadLetter)


class PlainServer(NatsServer):
    """A server with the payload limit that NATS has by default."""

    def _config(self) -> str:
        return super()._config().replace(f"max_payload: {MAX_PAYLOAD}\n", "")


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "max_payload", "batches"), [(NatsServer, MAX_PAYLOAD, False), (PlainServer, 1 << 20, True)]
)
async def test_trajectory_of_128k_tokens_with_its_routing_passes(
    tmp_path: Path, kind: type[NatsServer], max_payload: int, batches: bool
):
    tokens = 128 << 10
    routing = np.random.default_rng(0).bytes(tokens * 48 * 8)
    message = Routed(name="long", token_ids=np.arange(tokens, dtype=np.int32), routing=routing)
    async with kind(tmp_path) as server, Bus.connect(BusConfig(url=server.url), RUN, name="t") as bus:
        assert bus.client.max_payload == max_payload
        await ensure(bus.js, bus.topology, shards=1)
        recorder = Recorder()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(bus, recorder, batches=batches))
            await Publisher(bus).publish(
                bus.subject("trajectories", 0), encode(message), message_id=message.name
            )
        [got] = recorder.got
        assert got.routing == routing
        assert np.array_equal(got.token_ids, message.token_ids)
        assert await left(bus, 0)


@pytest.mark.nats
async def test_small_message_travels_as_it_is(bus: Bus):
    publisher = Publisher(bus)
    for size in (10, PART_BYTES, PART_BYTES + 1):
        await publisher.publish(bus.subject("trajectories", 0), b"x" * size, message_id=f"m{size}")
    stream = bus.topology.stream("TRAJECTORIES")
    found = [await bus.js.get_msg(stream, n) for n in (1, 2, 3, 4)]
    assert [set(raw.headers) - {"Nats-Msg-Id"} for raw in found] == [set(), set(), {SET}, {SET}]
    assert len(found[2].data) == PART_BYTES


@pytest.mark.nats
async def test_server_that_does_not_even_take_a_part_is_named(tmp_path: Path):
    class Tiny(NatsServer):
        def _config(self) -> str:
            return super()._config().replace(str(MAX_PAYLOAD), "65536")

    limit = "exceed the server's max_payload of 65536: raise it"
    async with Tiny(tmp_path) as server, Bus.connect(BusConfig(url=server.url), RUN, name="t") as bus:
        with pytest.raises(BusError, match=f"524288 bytes {limit}"):
            await Publisher(bus).publish("x", bytes(3 * PART_BYTES), message_id="m")
        await bus.create_keys()
        parts = {"part_bytes": 8 << 20, "part_sha256": bytes(32 * 32), "size_bytes": 256 << 20}
        ranks = tuple(BlobRef(subject=f"rank.{n}", chunks=1, digest="d", **parts) for n in range(64))
        policy = PolicyManifest(
            policy_version=1, incarnation="a", stage="rl", model=ranks[0], snapshot=ranks[0],
            snapshot_rest=ranks,
        )  # fmt: skip
        fits = replace(policy, snapshot_rest=ranks[:50])
        fits = replace(fits, incarnation="a" * (65536 - len(encode(fits)) - 40))
        for message in (policy, fits):  # the headers of the second one go beyond what it fits into
            with pytest.raises(BusError, match=rf"cannot write 'policy' to the bus: .*: \d+ bytes {limit}"):
                await bus.swap("policy", message, 0)
        assert await bus.swap("policy", replace(policy, snapshot_rest=ranks[:50]), 0)
        assert bus.client.stats["reconnects"] == 0


@pytest.mark.nats
@pytest.mark.parametrize("batches", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_parts_in_any_order_twice_and_among_others_make_each_message_once(bus: Bus, batches: bool):
    messages = [make(f"m{n}", size=n * PART) for n in range(1, 6)]
    parts = [part for message in messages for part in pieces(message)]
    small = make("small", size=1)
    shuffled = [*parts, *parts[::2], ({}, encode(small))]
    random.Random(0).shuffle(shuffled)
    name = bus.topology.stream("TRAJECTORIES")
    config = next(config for config in bus.topology.streams(2) if config.name == name)
    await bus.js.update_stream(config.evolve(duplicate_window=0.1))
    for n in (0, 1, 2):  # a window apart, so that the stream takes a part again
        await send(bus, *shuffled[n::3])
        await asyncio.sleep(0.15)
    recorder = Recorder(until=6)
    await run(bus, recorder, batches=batches)
    assert recorder.names == sorted(["small", *(m.name for m in messages)])
    assert {m.name: m.routing for m in recorder.got} == {m.name: m.routing for m in [*messages, small]}


@pytest.mark.nats
async def test_parts_of_two_attempts_never_mix_and_what_the_dead_one_left_is_forgotten(bus: Bus):
    first, second = make("g1", seed=1), make("g1", seed=2)
    died = pieces(first)[:2]
    await send(bus, *died)  # then it was killed, and its lease went to another
    recorder = Recorder(until=1)
    running = asyncio.create_task(run(bus, recorder))
    publisher = Publisher(bus, part_bytes=PART)
    await publisher.publish(bus.subject("trajectories", 0), encode(second), message_id="g1")
    await running
    assert [m.routing for m in recorder.got] == [second.routing]
    assert publisher.counts.duplicates == 0
    assert await left(bus, 0)
    assert await left(bus, 0, "DEAD")


@pytest.mark.nats
async def test_second_attempt_with_the_same_bytes_completes_the_set_of_the_first(bus: Bus):
    message = make("g1")
    await send(bus, *pieces(message)[:2])
    publisher = Publisher(bus, part_bytes=PART)
    await publisher.publish(bus.subject("trajectories", 0), encode(message), message_id="g1")
    assert publisher.counts.duplicates == 2
    recorder = Recorder()
    await run(bus, recorder)
    assert [m.routing for m in recorder.got] == [message.routing]
    assert await left(bus, 0)


@pytest.mark.nats
async def test_incomplete_set_blocks_nobody_and_ends_in_dead_with_its_reason(bus: Bus):
    await send(bus, *pieces(make("half"))[1:])
    for n in range(20):
        await send(bus, ({}, encode(make(f"m{n}", size=10))))
    inbox = inbox_of(bus, Parts(bus, incomplete_s=3600.0))  # nobody is given up before all others came
    endless = Recorder(until=99)
    running = asyncio.create_task(run(bus, endless, inbox))
    async with asyncio.timeout(60):
        while len(endless.got) < 20:  # noqa: ASYNC110 - the recorder has no event for it
            await asyncio.sleep(0.01)
    inbox.parts._incomplete_s = 1.0
    assert await left(bus, 1, "DEAD")
    assert await left(bus, 0)
    endless.stop.set()
    await running
    found = await letter(bus)
    assert found.reason == "half: 3 of 4 parts came, none for 1 s; missing [0]"
    assert inbox.parts.held_bytes == 0


@pytest.mark.nats
@pytest.mark.slow
async def test_set_is_not_given_up_while_its_consumer_is_busy(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts_module, "LONGEST_LOOK_S", 0.3)
    parts = pieces(make("m"))
    await send(bus, *parts[:2], ({}, encode(make("busy", size=1))))

    class Busy(Recorder):
        async def take(self, messages: list[Routed]) -> None:
            await super().take(messages)
            if messages[0].name == "busy":
                await send(bus, *parts[2:])
                await asyncio.sleep(1.5)

    recorder, inbox = Busy(until=2), inbox_of(bus, Parts(bus, incomplete_s=0.6))
    await run(bus, recorder, inbox, batches=True)
    assert recorder.names == ["busy", "m"]
    assert await left(bus, 0, "DEAD")


@pytest.mark.nats
@pytest.mark.slow
async def test_waiting_parts_are_not_redelivered_meanwhile(bus: Bus):
    name = bus.topology.stream("TRAJECTORIES")  # a busy machine may stand still for longer than 0.8 s
    await bus.js.add_consumer(name, dict(bus.topology.consumers(1))["TRAJECTORIES"].evolve(ack_wait=3.0))
    message = make("slow")
    parts = pieces(message)
    await send(bus, *parts[:-1])
    recorder = Recorder()
    running = asyncio.create_task(run(bus, recorder))
    await asyncio.sleep(3.5)  # more than an ack wait
    found = await bus.js.consumer_info(name, "shard-0")
    assert (found.num_ack_pending, found.num_redelivered) == (len(parts) - 1, 0)
    await send(bus, parts[-1])
    await running
    assert recorder.names == ["slow"]
    assert await left(bus, 0)


@pytest.mark.slow
@pytest.mark.nats
async def test_incomplete_sets_stay_within_their_bound_and_all_come_through(bus: Bus):
    messages = [make(f"m{n}", size=50 * PART) for n in range(6)]
    for parts in zip(*map(pieces, messages), strict=True):  # as interleaved as can be
        await send(bus, *parts)
    inbox, recorder = inbox_of(bus, Parts(bus, held_bytes=110 * PART)), Recorder(until=6)
    most = 0

    async def watch() -> None:
        nonlocal most
        while not recorder.stop.is_set():
            most = max(most, inbox.parts.held_bytes)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        tasks.create_task(run(bus, recorder, inbox, batches=True))
    assert recorder.names == [m.name for m in messages]
    assert 50 * PART < most <= 110 * PART
    assert await left(bus, 0)


@pytest.mark.nats
@pytest.mark.slow
async def test_set_that_stands_still_gives_way(bus: Bus):
    await send(bus, *pieces(make("half", size=50 * PART))[:-1], *pieces(make("full", size=60 * PART)))
    inbox, recorder = inbox_of(bus, Parts(bus, held_bytes=100 * PART)), Recorder(until=1)
    await run(bus, recorder, inbox)
    assert recorder.names == ["full"]


@pytest.mark.nats
async def test_message_above_the_bound_is_set_aside(bus: Bus):
    await send(bus, *pieces(make("huge", size=3 * PART)), ({}, encode(make("small", size=1))))
    recorder, told = Recorder(), set()

    async def tell(subject: str, message_id: str, _: SchemaError) -> None:
        told.add((subject, message_id.partition(".")[0]))

    await run(bus, recorder, inbox_of(bus, Parts(bus, held_bytes=2 * PART, on_unreadable=tell)))
    assert await left(bus, 4, "DEAD")
    assert told == {(bus.subject("trajectories", 0), "huge")}
    assert "this consumer holds 2000" in (await letter(bus)).reason


FORGED = (
    *("", "x", "0/2/10", "0/2/10/d/e", "a/2/10/d", "2/2/10/d", "-1/2/10/d", "0/0/10/d", "0/2/3/d"),
    *("0/99999999/99999999999/d", "0/2/-5/d", "9" * 5000 + "/2/10/d"),
)


@pytest.mark.nats
async def test_parts_with_forged_headers_are_set_aside(bus: Bus):
    for number, place in enumerate(FORGED):
        n, m = [*place.split("/"), "", ""][:2]
        await send(bus, ({SET: place, "Nats-Msg-Id": f"{number}.d.{n[:9]}of{m}"}, b"12345"))
    await send(bus, ({}, encode(make("s", size=1))))
    recorder = Recorder()
    await run(bus, recorder, batches=True)
    assert recorder.names == ["s"]
    assert await left(bus, len(FORGED), "DEAD")


@pytest.mark.nats
@pytest.mark.slow
async def test_parts_that_are_not_what_their_digest_says_are_set_aside_as_one(bus: Bus):
    parts = pieces(make("torn"))
    await send(bus, *parts[:-1], (parts[-1][0], bytes(len(parts[-1][1]))), ({}, encode(make("s", size=1))))
    recorder = Recorder()
    await run(bus, recorder)
    assert await left(bus, 1, "DEAD")
    assert (await letter(bus)).reason == "torn: the parts do not have their digest"
    assert await left(bus, 0)


@pytest.mark.nats
async def test_message_in_parts_that_is_refused_is_set_aside_as_one(bus: Bus):
    class Refusing(Recorder):
        async def take(self, messages: list[Routed]) -> None:
            if any(message.name == "bad" for message in messages):
                raise SchemaError("bad")
            await super().take(messages)

    publisher = Publisher(bus, part_bytes=PART)
    for name, data in (
        ("bad", encode(make("bad"))),
        ("garbage", b"garbage" * PART),
        ("good", encode(make("good"))),
    ):
        await publisher.publish(bus.subject("trajectories", 0), data, message_id=name)
    recorder = Refusing(until=1)
    await run(bus, recorder, batches=True)
    assert recorder.names == ["good"]
    assert await left(bus, 0)
    assert await left(bus, 2, "DEAD")


# --- crashes ---


@pytest.mark.nats
@pytest.mark.parametrize("batches", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_set_survives_a_consumer_that_dies_between_its_parts(bus: Bus, connect: Connect, batches: bool):
    message = make("m")
    parts = pieces(message)
    await send(bus, *parts[:2])
    async with connect("victim") as victim:
        inbox = inbox_of(victim)
        dying = asyncio.create_task(run(victim, Recorder(), inbox, batches=batches))
        while inbox.parts.held_bytes < 2 * PART:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        dying.cancel()
        await asyncio.wait([dying])
        await send(bus, *parts[2:])
        recorder = Recorder()
        await run(bus, recorder, batches=batches)
    assert [m.routing for m in recorder.got] == [message.routing]
    assert await left(bus, 0)


@pytest.mark.nats
async def test_set_returns_whole_after_its_handler_crashed(bus: Bus):
    message = make("m")
    await send(bus, *pieces(message))

    async def crash(_: Routed) -> None:
        raise RuntimeError("disk full")

    inbox = inbox_of(bus)
    with pytest.raises(ExceptionGroup, match="unhandled errors"):
        await consume(inbox, bus, Routed, crash, stop=asyncio.Event(), concurrency=2)
    assert await left(bus, 4)
    recorder = Recorder()
    await run(bus, recorder, inbox)
    assert recorder.names == ["m"]
    assert await left(bus, 0)


@pytest.mark.nats
@pytest.mark.slow
async def test_rest_of_a_set_whose_consumer_died_while_it_acked_does_not_stay_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    await send(bus, *pieces(make("m")))

    async def ack_one(received: Received[Routed]) -> None:
        await received.handle.raws[0].ack()
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Received, "ack", ack_one)
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await run(bus, Recorder())
    endless = Recorder(until=2)
    running = asyncio.create_task(run(bus, endless, inbox_of(bus, Parts(bus, incomplete_s=0.6))))
    assert await left(bus, 0)
    endless.stop.set()
    await running
    assert "missing [0" in (await letter(bus)).reason


@pytest.mark.nats
@pytest.mark.slow
async def test_long_handler_of_a_set_gets_it_once(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    await send(bus, *pieces(make("m")))

    class Slow(Recorder):
        async def take(self, messages: list[Routed]) -> None:
            await asyncio.sleep(2.0)  # its parts are redelivered meanwhile
            await super().take(messages)

    recorder = Slow(until=2)
    running = asyncio.create_task(run(bus, recorder))
    assert await left(bus, 0)
    recorder.stop.set()
    await running
    assert recorder.names == ["m"]
    assert await left(bus, 0, "DEAD")


@pytest.mark.nats
async def test_stop_gives_the_parts_of_an_incomplete_set_back_at_once(bus: Bus, connect: Connect):
    parts = pieces(make("m"))
    await send(bus, *parts[:3])
    name = bus.topology.stream("TRAJECTORIES")
    await bus.js.add_consumer(name, dict(bus.topology.consumers(1))["TRAJECTORIES"])  # ack wait: 30 s
    inbox, first = inbox_of(bus), Recorder()
    running = asyncio.create_task(run(bus, first, inbox))
    while inbox.parts.held_bytes < 2 * PART:  # noqa: ASYNC110 - it has no event for it
        await asyncio.sleep(0.01)
    first.stop.set()
    await running
    async with connect("successor") as other:
        await send(bus, *parts[3:])
        second = Recorder()
        await run(other, second)
    assert second.names == ["m"]


@pytest.mark.slow
@pytest.mark.nats
async def test_sets_survive_kills_of_the_server_between_their_parts(
    server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bus.streams.publish.ACK_TIMEOUT_S", 0.3)
    messages = [make(f"m{n}", size=3 * PART_BYTES) for n in range(12)]
    publisher, recorder = Publisher(bus), Recorder(until=1000)
    stored: list[str] = []

    async def publish(message: Routed) -> None:
        await publisher.publish(bus.subject("trajectories", 0), encode(message), message_id=message.name)
        stored.append(message.name)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        # It runs until nothing is left: an acknowledgement that a kill took costs one more delivery.
        tasks.create_task(run(bus, recorder, batches=True))
        async with asyncio.TaskGroup() as publishing:
            for message in messages:
                publishing.create_task(publish(message))
            for sets in (1, 2):
                await until(lambda sets=sets: len(stored) >= sets)
                parts = publisher.counts.stored
                await until(
                    lambda parts=parts: publisher.counts.stored > parts or len(stored) == len(messages)
                )
                await server.kill()
                await server.start()
        assert await left(bus, 0)
        recorder.stop.set()
    assert {m.name: m.routing for m in recorder.got} == {m.name: m.routing for m in messages}
    assert await left(bus, 0, "DEAD")


def test_split_costs_no_more_than_its_parts():
    data = bytes(16 << 20)
    tracemalloc.start()
    for headers, part in split(data, "m", PART_BYTES):
        assert len(part) <= PART_BYTES
        assert len(headers) == 2
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * PART_BYTES
