"""Connecting, requests and answers, keys."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from bus import answers, waiting
from bus.answers import PART, send_answer
from bus.client import BusClient
from bus.codec import Message, encode
from bus.config import BusConfig
from bus.connect import connected
from bus.connection import Bus
from bus.errors import BusAwayError, BusError, ConfigError, StorageError
from bus.messages import RunRecord
from bus.publish import Publisher
from bus.refusal import Refused
from bus.requests import Done, GroupRef, StoredRequest, Waiting
from bus.server import NatsServer, free_port
from bus.trajectory import Trajectory, TrajectoryBatch
from launch.chaos.link import faulty_link
from tests.conftest import Connect
from tests.factories import make_trajectory
from tests.processes import suspend

ASK = StoredRequest(after=3)


async def refusal(url: str, timeout_s: float = 0.4, error: type[Exception] = ConfigError) -> str:
    """Return what connecting to `url` fails with; it must leave no task behind."""
    before = asyncio.all_tasks()
    with pytest.raises(error) as caught:
        async with Bus.connect(BusConfig(url=url, connect_timeout_s=timeout_s), "test", name="t"):
            pytest.fail("connected")
    assert asyncio.all_tasks() == before
    return str(caught.value)


async def test_unreachable_bus_is_named_with_its_remedy_within_the_timeout():
    url = f"nats://127.0.0.1:{free_port('127.0.0.1')}"
    began = time.monotonic()
    with capture_logs() as logs:
        message = await refusal(url, error=BusAwayError)
    assert time.monotonic() - began < 15
    assert url in message
    assert "Connect call failed" in message
    assert "`launch bus`" in message
    assert len(logs) <= 1  # the reason once, not at every attempt


async def test_peer_that_is_no_nats_server_is_refused():
    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1") as listener:
        port = listener.sockets[0].getsockname()[1]
        assert "empty response" in await refusal(f"nats://127.0.0.1:{port}", error=BusAwayError)


@pytest.mark.parametrize("url", ["nats://host:port", "nats://", "nats://a:1,nats://b:x"])
async def test_url_that_cannot_be_read_is_refused_at_once(url: str):
    began = time.monotonic()
    assert url in await refusal(url, timeout_s=20)
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_wrong_credentials_are_refused_at_once_and_not_shown(tmp_path: Path):
    class Guarded(NatsServer):
        def _config(self) -> str:
            return super()._config() + 'authorization { user: "u", password: "right" }\n'

    async with Guarded(tmp_path) as server:
        began = time.monotonic()
        message = await refusal(f"nats://u:wrong@127.0.0.1:{server.port}", timeout_s=60)
        assert "Authorization Violation" in message
        assert "wrong" not in message
        assert "Authorization Violation" in await refusal(server.url, timeout_s=60)
        assert time.monotonic() - began < 30
        async with Bus.connect(BusConfig(url=server.url.replace("//", "//u:right@")), "test", name="t"):
            pass


@pytest.mark.parametrize("run", ["", "a.b", "a b", "a*", "a>"])
def test_run_name_that_cannot_be_a_subject_is_refused(run: str):
    with pytest.raises(ConfigError, match="use letters, digits"):
        Bus(Client(), run)


@pytest.mark.nats
async def test_request_without_a_responder_fails_at_once(bus: Bus):
    began = time.monotonic()
    with pytest.raises(BusError, match=r"nobody serves test\.nobody"):
        await bus.request("test.nobody", ASK, Done, timeout_s=60)
    with pytest.raises(BusError, match=r"nobody serves test\.nobody"):
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
@pytest.mark.slow  # the link needs its time
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
    async with asyncio.timeout(20):
        assert await heard.get() == GroupRef(lease_id=1, shard=0)


@pytest.mark.nats
async def test_key_is_put_read_and_deleted(bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "GARBLED_ATTEMPTS", 2)
    record = RunRecord(name="test", config_json="{}")
    assert await bus.get("run", RunRecord) is None
    await bus.put("run", record)
    async with connect("reader") as reader:
        found = await reader.get("run", RunRecord)
        assert found is not None
        assert found[0] == record
        with pytest.raises(BusError, match="unexpected message 'run'"):
            await reader.get("run", Trajectory)
        await reader.delete("run")
    assert await bus.get("run", RunRecord) is None


@pytest.mark.nats
async def test_swap_succeeds_only_on_the_revision_that_was_read(bus: Bus):
    first = await bus.swap("k", Waiting(reason="1"), 0)
    assert first is not None
    assert await bus.swap("k", Waiting(reason="x"), 0) is None
    second = await bus.swap("k", Waiting(reason="2"), first)
    assert second is not None
    assert await bus.swap("k", Waiting(reason="x"), first) is None
    assert await bus.get("k", Waiting) == (Waiting(reason="2"), second)
    await bus.delete("k")
    assert await bus.swap("k", Waiting(reason="x"), second) is None
    assert await bus.swap("k", Waiting(reason="3"), 0) is not None


@pytest.mark.nats
async def test_one_of_many_swaps_at_the_same_moment_wins(bus: Bus):
    swaps = [bus.swap("k", Waiting(reason=str(n)), 0) for n in range(20)]
    assert sum(revision is not None for revision in await asyncio.gather(*swaps)) == 1


@pytest.mark.nats
async def test_waiting_for_a_key_ends_with_its_message_or_a_hint(bus: Bus):
    with pytest.raises(BusAwayError, match=r"run 'test': waited 0\.1 s for 'run': start `launch storage`"):
        await bus.wait_for("run", RunRecord, timeout_s=0.1, hint="start `launch storage`")
    waiting = asyncio.create_task(bus.wait_for("run", RunRecord, timeout_s=20, hint=""))
    await asyncio.sleep(0)
    await bus.put("run", RunRecord(name="test", config_json="{}"))
    assert (await waiting).name == "test"


@pytest.mark.nats
async def test_waiting_for_a_key_asks_again_when_nobody_answers(bus: Bus, server: NatsServer, monkeypatch):
    """Nobody answers while a stream has no leader."""
    await bus.put("run", RunRecord(name="test", config_json="{}"))
    monkeypatch.setattr(bus.js, "_timeout", 0.2)
    get, failed = bus._get, []

    async def noted(key, expected):
        try:
            return await get(key, expected)
        except BusError as error:
            failed.append(str(error))
            if len(failed) == 2:
                os.kill(server.pid, signal.SIGCONT)
            raise

    monkeypatch.setattr(bus, "_get", noted)
    await suspend(server.pid)
    with pytest.raises(BusError, match=r"cannot read 'run' from the bus: .*timeout"):
        await bus.wait_for("run", RunRecord, timeout_s=0.0, hint="")
    assert len(failed) == 1
    record = await bus.wait_for("run", RunRecord, timeout_s=30, hint="")
    assert record.name == "test"
    assert len(failed) >= 2


@pytest.mark.nats
async def test_run_without_keys_reads_as_absent_and_cannot_be_written(server: NatsServer):
    async with Bus.connect(BusConfig(url=server.url), "nobody", name="t") as bus:
        assert await bus.get("run", RunRecord) is None
        for write in (bus.put("run", Done()), bus.swap("run", Done(), 0), bus.delete("run")):
            with pytest.raises(BusError, match="'run'"):
                await write


@pytest.mark.nats
async def test_connection_outlives_a_restart_of_the_server_and_says_so_once(server: NatsServer, bus: Bus):
    async def handle(_: StoredRequest) -> list[Done]:
        return [Done()]

    await bus.serve("test.ask", StoredRequest, handle)
    await bus.put("k", Done())
    with capture_logs() as logs:
        await server.kill()
        await asyncio.sleep(0.6)  # an outage of several attempts to reconnect
        with pytest.raises(BusAwayError, match=r"test\.ask: the bus is away"):
            await bus.request("test.ask", ASK, Done, timeout_s=20)
        await server.start()
        assert await bus.get("k", Done) is not None
        assert await bus.request("test.ask", ASK, Done, timeout_s=20) == Done()
        async with asyncio.timeout(10):
            while not any(log["event"] == "bus_reconnected" for log in logs):  # noqa: ASYNC110  # said later
                await asyncio.sleep(0.01)
    assert [log["event"] for log in logs].count("bus_reconnected") == 1
    assert len(logs) <= 4  # each reason once


@pytest.mark.nats
async def test_keys_wait_for_a_bus_that_is_away_and_nothing_is_sent_meanwhile(server: NatsServer, bus: Bus):
    await bus.put("k", Done())
    await server.kill()
    async with asyncio.timeout(10):
        while bus.client.is_connected:  # noqa: ASYNC110  # the connection is noticed to be broken
            await asyncio.sleep(0.01)
    with capture_logs() as logs:
        asked = [bus.get("k", Done), bus.put("k", Done()), bus.keys("role"), bus.delete("other")]
        tasks = [asyncio.create_task(ask) for ask in asked]
        await bus.notify("test.news", Done())
        async with asyncio.timeout(10):
            while sum("what" in log for log in logs) < len(tasks):  # noqa: ASYNC110  # each says what it waits for
                await asyncio.sleep(0.01)
        assert bus.client.pending_data_size == 0
        assert not any(task.done() for task in tasks)
    assert {log.get("what") for log in logs} >= {"reading 'k'", "writing 'k'", "listing the keys 'role'"}
    await server.start()
    async with asyncio.timeout(10):
        found, *_ = await asyncio.gather(*tasks)
    assert found is not None
    assert found[0] == Done()


@pytest.mark.nats
async def test_patience_for_a_bus_that_is_away_ends(server: NatsServer, monkeypatch):
    stop = asyncio.Event()
    impatient = BusConfig(url=server.url, patience_s=0.1)
    async with (
        Bus.connect(impatient, "test", name="impatient") as bus,
        Bus.connect(BusConfig(url=server.url), "test", name="stopping", stop=stop) as stopping,
    ):
        await server.kill()
        with pytest.raises(BusAwayError, match=r"reading 'k': the bus was away for 0 s"):
            await bus.get("k", Done)
        stop.set()
        monkeypatch.setattr(waiting, "STOPPING_S", 0.1)
        with pytest.raises(BusAwayError, match="the bus was away"):
            await stopping.get("k", Done)
        async with asyncio.timeout(15):
            with pytest.raises(BusAwayError, match="a was not stored"):
                await Publisher(stopping).publish(stopping.subject("tasks", 0), b"x", message_id="a")


@pytest.mark.nats
async def test_leaving_does_not_wait_for_a_bus_that_is_gone(server: NatsServer, connect: Connect):
    async with connect("t"):
        await server.kill()
        began = time.monotonic()
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_keys_are_listed_by_their_first_part(bus: Bus):
    assert await bus.keys("role") == []
    record = RunRecord(name="test", config_json="{}")
    for key in ("role.two", "role.one.a", "roles.three", "another.role.four"):
        await bus.put(key, record)
    assert await bus.keys("role") == ["role.one.a", "role.two"]
    await bus.delete("role.two")
    assert await bus.get("role.two", RunRecord) is None, "though it may be listed"
    assert "role.one.a" in await bus.keys("role")


@pytest.mark.nats
async def test_looks_at_the_keys_leave_no_consumer_behind(bus: Bus):
    await bus.put("role.one", Done())
    for _ in range(50):
        assert await bus.keys("role") == ["role.one"]
    bucket = await bus.js.stream_info(f"KV_{bus.topology.bucket}")
    assert bucket.state.consumer_count == 0


@pytest.mark.nats
async def test_keys_of_a_run_that_has_none_cannot_be_listed(server: NatsServer):
    async with Bus.connect(BusConfig(url=server.url), "nobody", name="t") as bus:
        with pytest.raises(BusError, match="cannot list the keys 'role'"):
            await bus.keys("role")


@pytest.mark.nats
async def test_a_connection_whose_end_is_cancelled_leaves_no_socket_open(
    server: NatsServer, connect: Connect
):
    ending = asyncio.Event()
    clients: list[Client] = []

    async def flush(*_: object) -> None:
        ending.set()
        await asyncio.Event().wait()

    async def use() -> None:
        async with connect("hurried") as bus:
            clients.append(bus.client)
            bus.client.flush = flush

    using = asyncio.create_task(use())
    async with asyncio.timeout(15):
        await ending.wait()
        using.cancel()
        await asyncio.wait([using])
    assert clients[0]._transport._io_writer.is_closing()
    await clients[0].close()


@pytest.mark.nats
async def test_a_client_that_connects_though_its_caller_was_cancelled_is_closed(
    server: NatsServer, monkeypatch
):
    """As Python 3.11's `asyncio.wait_for` forgets a cancellation that comes with the answer."""
    begun, clients, connect = asyncio.Event(), [], BusClient.connect

    async def connects_anyway(self, *args, **settings):
        clients.append(self)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await connect(self, *args, **settings)

    monkeypatch.setattr(BusClient, "connect", connects_anyway)
    connecting = asyncio.create_task(connected(BusConfig(url=server.url), "t", None))
    async with asyncio.timeout(15):
        await begun.wait()
        connecting.cancel()
        await asyncio.wait([connecting])
    assert connecting.cancelled()
    assert clients[0].is_closed
