"""Every message is stored exactly once, whatever happens to the server meanwhile."""

import asyncio
import resource
import time

import pytest
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig

from bus.connection import Bus
from bus.connection.status import Activity, report_status
from bus.errors import BusError
from bus.messages import Status, stores_nothing
from bus.server.nats_server import MAX_PAYLOAD, NatsServer
from bus.streams.consume import Inbox
from bus.streams.publish import HEADER_BYTES, Publisher
from tests.conftest import Connect


async def stored(bus: Bus, stream: str) -> int:
    return int((await bus.js.stream_info(bus.topology.stream(stream))).state.messages)


@pytest.mark.nats
async def test_message_is_stored_once_under_its_id(bus: Bus):
    publisher = Publisher(bus)
    for _ in range(3):
        await publisher.publish(bus.subject("trajectories", 0), b"x", message_id="a")
    await publisher.publish(bus.subject("trajectories", 0), b"x", message_id="b")
    assert (publisher.counts.stored, publisher.counts.duplicates) == (2, 2)
    assert await stored(bus, "TRAJECTORIES") == 2


@pytest.mark.nats
async def test_pipelined_messages_are_stored_once_through_two_kills_of_the_server(
    server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bus.streams.publish.ACK_TIMEOUT_S", 0.5)
    publisher = Publisher(bus, window=16)
    subject = bus.subject("trajectories", 1)
    finished = asyncio.Semaphore(0)

    async def publish(n: int) -> None:
        await publisher.publish(subject, b"x" * 16384, message_id=f"m{n}")
        finished.release()

    async with asyncio.TaskGroup() as tasks:
        for n in range(500):
            tasks.create_task(publish(n))
        for _ in range(2):
            for _ in range(150):
                await finished.acquire()
            await server.kill()
            await server.start()
    assert await stored(bus, "TRAJECTORIES-1") == 500
    counts = publisher.counts
    assert counts.stored + counts.duplicates == 500
    assert counts.retries > 0  # the kills did hit messages in flight


@pytest.mark.nats
async def test_stream_that_stores_nothing_is_complained_of_until_the_server_is_restarted(
    server: NatsServer, bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    """Once a write has failed, nats-server answers whatever is asked, and stores nothing on that stream."""
    monkeypatch.setattr("bus.streams.publish.ACK_TIMEOUT_S", 0.1)
    heard: asyncio.Queue[Status] = asyncio.Queue()
    await bus.listen(bus.subject("status", "actor"), Status, heard.put_nowait)

    async def said(text: str) -> None:
        async with asyncio.timeout(60):
            while text not in (await heard.get()).text:
                pass

    async with connect("actor") as actor, asyncio.TaskGroup() as tasks:
        stop, publisher = asyncio.Event(), Publisher(actor)
        look = lambda: Activity("rolling out")  # noqa: E731
        tasks.create_task(report_status(actor, source="me", role="actor", look=look, stop=stop))
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        tasks.create_task(publisher.publish(bus.subject("trajectories", 0), b"x", message_id="a"))
        await said(f"{stores_nothing(['TRAJECTORIES'])}; rolling out")
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (soft, hard))
        await publisher.publish(bus.subject("events", "metrics"), b"x", message_id="b")  # that is another
        assert actor.not_storing == {"TRAJECTORIES"}
        await server.kill()
        await server.start()
        while actor.not_storing:
            await said("rolling out")
        stop.set()
    assert await stored(bus, "TRAJECTORIES") == 1


@pytest.mark.nats
async def test_server_that_is_away_is_no_stream_that_stores_nothing(
    server: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bus.streams.publish.ACK_TIMEOUT_S", 0.05)
    monkeypatch.setattr("bus.streams.publish.LONGEST_PAUSE_S", 0.1)
    publisher = Publisher(bus)
    await server.kill()
    publishing = asyncio.create_task(publisher.publish(bus.subject("events", "x"), b"x", message_id="a"))
    async with asyncio.timeout(60):
        while publisher.counts.retries < 8:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert not bus.not_storing
        await server.start()
        await publishing


@pytest.mark.nats
async def test_message_sent_again_after_a_restart_is_a_duplicate(server: NatsServer, bus: Bus):
    publisher = Publisher(bus)
    subject = bus.subject("trajectories", 0)
    await publisher.publish(subject, b"x", message_id="a")
    await server.kill()
    await server.start()
    await publisher.publish(subject, b"x", message_id="a")
    assert publisher.counts.duplicates == 1
    assert await stored(bus, "TRAJECTORIES") == 1


@pytest.mark.nats
async def test_full_stream_holds_publishers_back_until_a_consumer_acks(bus: Bus, connect: Connect):
    await tiny_stream(bus, max_bytes=20_000)
    publisher, everything = Publisher(bus), {b"%d" % n + b"x" * 1000 for n in range(100)}
    received: list[bytes] = []
    async with connect("consumer") as other, asyncio.TaskGroup() as tasks:
        for n, data in enumerate(everything):
            tasks.create_task(publisher.publish("tiny", data, message_id=str(n)))
        inbox = Inbox(other, "TINY", "reader")
        async with asyncio.timeout(60):
            while len(received) < len(everything):
                for raw in await inbox.take(10):
                    received.append(raw.data)
                    await raw.ack()
        await inbox.give_back()
    assert len(received) == len(everything)
    assert set(received) == everything
    assert publisher.counts.refused_full > 0


async def tiny_stream(bus: Bus, max_bytes: int) -> None:
    """A work queue TINY with room for a few messages, and its consumer `reader`."""
    name = bus.topology.stream("TINY")
    work = {"retention": RetentionPolicy.WORK_QUEUE, "discard": DiscardPolicy.NEW}
    await bus.js.add_stream(StreamConfig(name=name, subjects=["tiny"], max_bytes=max_bytes, **work))
    await bus.js.add_consumer(name, durable_name="reader", ack_policy="explicit")


@pytest.mark.nats
async def test_stream_that_stays_full_ends_in_an_error(bus: Bus):
    await tiny_stream(bus, max_bytes=1500)
    publisher = Publisher(bus)
    await publisher.publish("tiny", b"x" * 1000, message_id="a")
    with pytest.raises(BusError, match=r"tiny: b was not stored within \d"):
        await publisher.publish("tiny", b"x" * 1000, message_id="b", timeout_s=0.2)


@pytest.mark.nats
async def test_whole_message_larger_than_the_server_takes_fails_at_once(bus: Bus):
    publisher = Publisher(bus, part_bytes=None)
    for size in (MAX_PAYLOAD, MAX_PAYLOAD + 1):  # the headers count as well
        began = time.monotonic()
        with pytest.raises(BusError, match=rf"{size} bytes exceed the server's max_payload of {MAX_PAYLOAD}"):
            await publisher.publish(bus.subject("trajectories", 0), b"x" * size, message_id="big")
        assert time.monotonic() - began < 15


@pytest.mark.nats
@pytest.mark.parametrize("part_bytes", [None, MAX_PAYLOAD - 200])
async def test_largest_message_that_is_not_refused_is_stored(
    bus: Bus, part_bytes: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bus.streams.publish.ACK_TIMEOUT_S", 60.0)  # a busy server needs seconds for it
    publisher = Publisher(bus, part_bytes=part_bytes)
    data = b"x" * (MAX_PAYLOAD - bus_headers("m"))
    await publisher.publish(bus.subject("trajectories", 0), data, message_id="m", timeout_s=60)
    assert publisher.counts.retries == 0


def bus_headers(message_id: str) -> int:
    return HEADER_BYTES + len(message_id)


@pytest.mark.nats
async def test_refusal_that_waiting_cannot_mend_fails_at_once(bus: Bus):
    name = bus.topology.stream("SMALL")
    await bus.js.add_stream(StreamConfig(name=name, subjects=["small"], max_msg_size=100))
    with pytest.raises(BusError, match="small: the stream refuses: message size exceeds maximum allowed"):
        await Publisher(bus).publish("small", b"x" * 200, message_id="a")


@pytest.mark.nats
async def test_subject_without_a_stream_is_tried_again_until_the_deadline(bus: Bus):
    publisher = Publisher(bus)
    publishing = asyncio.create_task(publisher.publish("tiny", b"x", message_id="a", timeout_s=60))
    async with asyncio.timeout(60):
        while publisher.counts.retries < 2:  # noqa: ASYNC110  # nothing tells of an attempt
            await asyncio.sleep(0.01)
    await tiny_stream(bus, max_bytes=1500)
    await publishing
    with pytest.raises(BusError, match=r"nowhere: a was not stored within \d"):
        await publisher.publish("nowhere", b"x", message_id="a", timeout_s=0.2)
