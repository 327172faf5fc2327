"""Requests and notices over the bus, and the errors by which they end."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from bus.codec import Message, encode
from bus.config import BusConfig
from bus.connection import Bus, answers
from bus.connection.answers import PART, Refused, send_answer
from bus.errors import BusError, StorageError
from bus.requests import Done, GroupRef, StoredRequest, Waiting
from bus.server.nats_server import NatsServer
from bus.trajectory import TrajectoryBatch
from soak.link import faulty_link
from tests.bus.connection.questions import ASK
from tests.conftest import Connect
from tests.factories import make_trajectory


@pytest.mark.nats
async def test_request_without_a_responder_fails_at_once(bus: Bus):
    began = time.monotonic()
    with pytest.raises(BusError, match=r"nobody serves test\.nobody now: .* starting, cut off"):
        await bus.request("test.nobody", ASK, Done, timeout_s=60)
    with pytest.raises(BusError, match=r"nobody serves test\.nobody now: .* starting, cut off"):
        await bus.request_many("test.nobody", ASK, Done, timeout_s=60)
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_request_is_answered(bus: Bus, connect: Connect):
    async def handle(request: StoredRequest) -> list[GroupRef]:
        return [GroupRef(lease_id=request.after, shard=1)]

    await bus.serve("test.ask", StoredRequest, handle)
    async with connect("asker") as asker:
        answer = await asker.request("test.ask", ASK, Waiting, GroupRef, timeout_s=20)
    assert answer == GroupRef(lease_id=3, shard=1)


@pytest.mark.nats
async def test_slow_request_does_not_hold_up_the_next(bus: Bus):
    second = asyncio.Event()

    async def handle(request: StoredRequest) -> list[Done]:
        if request.after == 1:
            await second.wait()
        second.set()
        return [Done()]

    await bus.serve("test.ask", StoredRequest, handle)
    asked = [bus.request("test.ask", StoredRequest(after=n), Done, timeout_s=20) for n in (1, 2)]
    assert await asyncio.gather(*asked) == [Done(), Done()]


@pytest.mark.nats
@pytest.mark.parametrize(
    ("error", "reason"),
    [(BusError("no room"), "no room"), (StorageError("torn"), "torn"), (KeyError("k"), "KeyError: 'k'")],
)
async def test_error_of_the_responder_reaches_the_asker_and_spares_the_responder(
    bus: Bus, error: Exception, reason: str
):
    async def handle(request: StoredRequest) -> list[Done]:
        if request.after == 3:
            raise error
        return [Done()]

    await bus.serve("test.ask", StoredRequest, handle)
    with pytest.raises(BusError, match=f"test.ask: {reason}"):
        await bus.request("test.ask", ASK, Done, timeout_s=20)
    with pytest.raises(BusError, match=f"test.ask: {reason}"):
        await bus.request_many("test.ask", ASK, Done, timeout_s=20)
    assert await bus.request("test.ask", StoredRequest(after=0), Done, timeout_s=20) == Done()


@pytest.mark.nats
async def test_refusal_is_an_error_and_a_request_not_understood_is_refused(bus: Bus):
    async def handle(_: StoredRequest) -> list[Refused]:
        return [Refused(reason="fenced")]

    await bus.serve("test.ask", StoredRequest, handle)
    with pytest.raises(BusError, match=r"test\.ask: fenced"):
        await bus.request("test.ask", ASK, Done, timeout_s=20)
    with pytest.raises(BusError, match="unexpected message 'done'"):
        await bus.request("test.ask", Done(), Done, timeout_s=20)


@pytest.mark.nats
async def test_silent_responder_ends_in_an_error_that_names_it(bus: Bus):
    async def handle(_: StoredRequest) -> list[Done]:
        return []

    await bus.serve("test.ask", StoredRequest, handle)
    with pytest.raises(BusError, match=r"no answer from test\.ask within 0\.1 s"):
        await bus.request("test.ask", ASK, Done, timeout_s=0.1)
    with pytest.raises(BusError, match=r"no answer from test\.ask within 0\.1 s"):
        await bus.request_many("test.ask", ASK, Done, timeout_s=0.1)


@pytest.mark.nats
async def test_answer_in_many_messages_arrives_whole_and_in_order(bus: Bus, connect: Connect):
    async def handle(request: StoredRequest) -> list[GroupRef | Done]:
        return [*(GroupRef(lease_id=n, shard=0) for n in range(request.after)), Done()]

    await bus.serve("test.ask", StoredRequest, handle)
    async with connect("asker") as asker:
        many = await asker.request_many("test.ask", StoredRequest(after=2000), GroupRef, timeout_s=20)
        none = await asker.request_many("test.ask", StoredRequest(after=0), GroupRef, timeout_s=20)
    assert [group.lease_id for group in many] == list(range(2000))
    assert none == []


@pytest.mark.nats
async def test_answer_of_which_a_part_was_lost_is_an_error(bus: Bus):
    async def lossy(raw: Msg) -> None:
        await bus.client.publish(raw.reply, encode(GroupRef(lease_id=0, shard=0)), headers={PART: "0"})
        await bus.client.publish(raw.reply, encode(Done()), headers={PART: "2"})

    await bus.client.subscribe("test.lossy", cb=lossy)
    with pytest.raises(BusError, match="part 1 of the answer was lost"):
        await bus.request_many("test.lossy", ASK, GroupRef, timeout_s=20)


@pytest.mark.nats
@pytest.mark.nightly  # the link needs its time
async def test_answer_above_what_the_server_holds_arrives_over_a_link_slower_than_the_sender(
    bus: Bus, server: NatsServer
):
    batch = TrajectoryBatch(trajectories=(make_trajectory(tokens=60_000),))
    size = len(encode(batch))
    many = 300_000_000 // size

    async def handle(_: StoredRequest) -> list[TrajectoryBatch | Done]:
        return [*([batch] * many), Done()]

    await bus.serve("test.ask", StoredRequest, handle)
    async with faulty_link(server.port, bytes_per_s=20e6) as link:
        config = BusConfig(url=f"nats://127.0.0.1:{link.port}")
        async with Bus.connect(config, "test", name="far") as far:
            found = await far.request_many("test.ask", ASK, TrajectoryBatch, timeout_s=10)
            assert far.client.stats["reconnects"] == 0
    assert len(found) == many


@pytest.mark.nats
async def test_sender_of_an_answer_stops_when_its_asker_is_gone(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    batch = TrajectoryBatch(trajectories=(make_trajectory(tokens=60_000),))
    sent = 0

    def endless() -> Iterator[Message]:
        nonlocal sent
        while True:
            sent += 1
            yield batch

    inbox = bus.client.new_inbox()
    replies = await bus.client.subscribe(inbox)
    monkeypatch.setattr(answers, "TAKEN_TIMEOUT_S", 1.0)
    sending = asyncio.create_task(send_answer(bus.client, inbox, endless()))
    await replies.next_msg(timeout=20)
    await replies.unsubscribe()
    with pytest.raises(BusError, match=r"does not listen|took no piece"):
        async with asyncio.timeout(answers.TAKEN_TIMEOUT_S + 5):
            await sending
    assert sent * len(encode(batch)) < 2 * answers.WINDOW_BYTES


@pytest.mark.nats
async def test_answer_larger_than_the_server_takes_becomes_a_refusal(bus: Bus):
    async def handle(_: StoredRequest) -> list[TrajectoryBatch]:
        return [TrajectoryBatch(trajectories=(make_trajectory(tokens=700_000),))]

    await bus.serve("test.ask", StoredRequest, handle)
    with pytest.raises(BusError, match=r"answer of \d+ bytes exceeds max_payload"):
        await bus.request("test.ask", ASK, TrajectoryBatch, timeout_s=20)


@pytest.mark.nats
async def test_notice_reaches_who_listens_and_a_bad_one_is_passed_over(bus: Bus):
    heard: asyncio.Queue[GroupRef] = asyncio.Queue()
    await bus.listen("test.news", GroupRef, heard.put_nowait)
    await bus.client.publish("test.news", b"garbage")
    await bus.notify("test.news", GroupRef(lease_id=1, shard=0))
    async with asyncio.timeout(60):
        assert await heard.get() == GroupRef(lease_id=1, shard=0)


@pytest.mark.nats
async def test_a_notice_that_is_too_large_is_told_once_and_the_connection_lives(bus: Bus):
    heard: asyncio.Queue[Refused] = asyncio.Queue()
    await bus.listen("test.news", Refused, heard.put_nowait)
    with capture_logs() as logged:
        for _ in range(3):
            await bus.notify("test.news", Refused(reason="x" * bus.client.max_payload))
    [line] = [one for one in logged if one["event"] == "notice_not_sent"]
    assert line["subject"] == "test.news"
    assert "bytes exceed the server's max_payload" in line["reason"]
    await bus.notify("test.news", Refused(reason="short"))
    async with asyncio.timeout(60):
        assert await heard.get() == Refused(reason="short")


@pytest.mark.nats
async def test_cancellation_that_comes_with_the_answer_of_a_stream_ends_the_task(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    """`asyncio.wait_for` in nats-py forgets it then, and a process would go on that is to end."""
    asked = bus.client.request

    async def request(*arguments: object, **options: object) -> object:
        answer = await asked(*arguments, **options)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(bus.client, "request", request)
    task = asyncio.create_task(bus.js.stream_info(bus.topology.stream("TASKS")))
    with pytest.raises(asyncio.CancelledError):
        await task
