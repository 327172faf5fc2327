"""Requests always end, and a connection that seems deaf is made anew."""

import asyncio
import gc
import os
import signal
from contextlib import suppress
from functools import partial
from typing import Any

import nats.errors
import pytest
from structlog.testing import capture_logs

from bus import waiting
from bus.codec import Message
from bus.config import BusConfig
from bus.connection import Bus
from bus.connection import client as of_client
from bus.errors import BusAwayError, BusError
from bus.messages import RunRecord
from bus.requests import Done, StoredRequest
from bus.server.nats_server import NatsServer
from tests.conftest import Connect
from tests.processes import suspend

TIMEOUT_S = 60


async def ask(bus: Bus, timeout_s: float = 0.05) -> None:
    await bus.request(bus.subject("rpc", "silent"), StoredRequest(after=0), Done, timeout_s=timeout_s)


async def test_a_connection_on_which_requests_stay_without_answer_is_made_anew(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(of_client, "SILENT_S", 0.2)
    answers = asyncio.Event()

    async def answer(request: StoredRequest) -> list[Message]:
        await answers.wait()
        return [Done()]

    async with connect("server") as server, connect("asker") as asker:
        subject = asker.subject("rpc", "silent")
        await server.serve(subject, StoredRequest, answer)
        with capture_logs() as logs:
            async with asyncio.timeout(TIMEOUT_S):
                while not asker.client.stats["reconnects"]:
                    with pytest.raises(BusError):
                        await ask(asker)
                    await asyncio.sleep(0)  # while there is no connection, asking fails at once
        told = [entry["subject"] for entry in logs if entry["event"] == "bus_connected_anew"]
        assert told == [subject]
        assert asker.client._silent_s == 0.4  # the next time it waits for longer
        answers.set()
        await asker.patiently(partial(ask, asker, TIMEOUT_S), "an answer")
        assert asker.client.stats["reconnects"] == 1


async def test_a_server_that_stands_still_is_not_told_as_one_that_does_not_run(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting, "SLOW_S", 0.05)
    config = BusConfig(url=server.url, connect_timeout_s=3.0)
    assert server.pid is not None
    await suspend(server.pid)
    try:
        with capture_logs() as logs, pytest.raises(BusAwayError) as refused:
            async with Bus.connect(config, "test", name="late"):
                pass
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (logs[0]["event"], logs[0]["longest_s"]) == ("waiting_for_the_bus", 3.0)
    text = str(refused.value)
    assert " (no answer" in text
    assert "): if none runs there, start one with `launch bus`" in text


async def test_a_flush_comes_behind_what_was_sent_before_it(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    """Who subscribes, flushes and tells another of the subject is heard: nats-py's ping overtook the rest."""
    transport, sent = bus.client._transport, []
    write, write_all = transport.write, transport.writelines

    def writing(data: bytes) -> None:
        sent.append(bytes(data))
        write(data)

    def writing_all(parts: list[bytes]) -> None:
        sent.extend(map(bytes, parts))
        write_all(parts)

    monkeypatch.setattr(transport, "write", writing)
    monkeypatch.setattr(transport, "writelines", writing_all)
    await bus.client.subscribe("news")
    await bus.client.publish("more", b"x")
    await bus.client.flush()
    assert [command.split()[0] for command in sent] == [b"SUB", b"PUB", b"PING"]


async def test_answers_and_a_subject_that_nobody_serves_are_no_silence(
    connect: Connect, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(of_client, "SILENT_S", 0.0)
    async with connect("asker") as asker:
        for _ in range(3):
            with pytest.raises(BusError, match="nobody serves"):
                await ask(asker)
        assert await asker.get("policy", StoredRequest) is None
        assert asker.client.stats["reconnects"] == 0


async def test_a_request_that_cannot_even_be_sent_ends(connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_client, "SEND_S", 0.1)

    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async with connect("asker") as asker:
        monkeypatch.setattr(asker.client, "publish", hang)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(nats.errors.TimeoutError):
                await asker.client.request("anything", b"", timeout=0.1)


async def test_a_flush_that_was_cancelled_does_not_end_the_reading(connect: Connect):
    async with connect("asker") as asker:
        flushing = asyncio.create_task(asker.client.flush())
        while not asker.client._pongs:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait([flushing])
        await asker.client.flush()
        assert not asker.client._reading_task.done()


async def test_the_end_of_a_connection_to_a_server_that_hangs_is_quick_and_leaves_no_complaint(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    """Python would print the error of a drain that is cancelled, which nobody looks at."""
    monkeypatch.setattr(of_client, "DRAIN_S", 0.1)
    monkeypatch.setattr(of_client, "CLOSE_S", 0.2)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    assert server.pid is not None
    with capture_logs() as logs:
        async with Bus.connect(BusConfig(url=server.url), "test", name="ends") as bus:
            await bus.listen("anything", Done, lambda _: None)
            await suspend(server.pid)
    os.kill(server.pid, signal.SIGCONT)
    gc.collect()
    assert complaints == []
    assert "bus_not_drained" in [line["event"] for line in logs]


async def test_a_complaint_of_the_server_of_garbled_bytes_makes_a_new_connection(bus: Bus):
    """nats-py would close the connection for good."""
    assert bus.client._transport is not None
    for _ in range(3):
        before = bus.client.stats["reconnects"]
        bus.client._transport.write(b"\xeb\xc9\xe6U\xc7 garbled\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            while not (bus.client.stats["reconnects"] > before and bus.client.is_connected):
                assert not bus.client.is_closed
                await asyncio.sleep(0.01)
        await bus.put("run", RunRecord(name="test", config_json="{}"))


@pytest.mark.parametrize(
    "greeting", [b'INFO {"a": 1}\r\n-ERR \xff\xfe\r\n', b"INFO [1]\r\n", b"x" * (1 << 20)]
)
async def test_a_garbled_greeting_does_not_end_the_attempts_to_reconnect(
    bus: Bus, server: NatsServer, greeting: bytes
):
    greeted = asyncio.Event()

    async def garble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with suppress(OSError):
            await writer.drain()
        writer.close()
        greeted.set()

    await server.kill()
    async with await asyncio.start_server(garble, "127.0.0.1", server.port), asyncio.timeout(TIMEOUT_S):
        await greeted.wait()
    await server.start()
    await bus.put("run", RunRecord(name="test", config_json="{}"))
    assert bus.client.is_connected
