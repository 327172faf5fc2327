"""Connecting to the bus, and what a connection outlives."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs

from bus import waiting
from bus.config import BusConfig
from bus.connection import Bus
from bus.connection.client import BusClient, connected, refuse_other_layout
from bus.errors import BusAwayError, ConfigError
from bus.requests import Done, StoredRequest
from bus.server.nats_server import NatsServer, free_port
from bus.streams.publish import Publisher
from tests.bus.connection.questions import ASK
from tests.conftest import Connect


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
        async with asyncio.timeout(60):
            while not any(log["event"] == "bus_reconnected" for log in logs):  # noqa: ASYNC110  # said later
                await asyncio.sleep(0.01)
    assert [log["event"] for log in logs].count("bus_reconnected") == 1
    errors = [log["error"] for log in logs if log["event"] == "bus_error"]
    assert errors
    assert all(before != error for before, error in pairwise(errors)), "a reason is said when it is another"
    assert [log["event"] for log in logs].count("waiting_for_the_bus") <= 1


@pytest.mark.nats
async def test_patience_for_a_bus_that_is_away_ends(server: NatsServer, monkeypatch):
    stop = asyncio.Event()
    impatient = BusConfig(url=server.url, patience_s=0.1)
    async with (
        Bus.connect(impatient, "test", name="impatient") as bus,
        Bus.connect(BusConfig(url=server.url), "test", name="stopping", stop=stop) as stopping,
    ):
        await server.kill()
        with pytest.raises(BusAwayError, match=r"reading 'k': the bus was away for \d+ s"):
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


async def test_a_connection_that_ends_at_its_first_request_is_a_bus_that_is_away(server: NatsServer):
    """A server that takes over other keys ends connections that have just been made."""
    client = await connected(BusConfig(url=server.url), "ends", None)
    await client.close()
    with pytest.raises(BusAwayError, match="ended at its first request: nats: connection closed"):
        await refuse_other_layout(client, "test", 1.0)
