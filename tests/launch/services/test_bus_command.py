import asyncio
from pathlib import Path

import nats.errors
import psutil
import pytest
from nats.aio.client import Client
from nats.js.client import JetStreamContext

from bus.server.nats_server import NatsServer, free_port
from launch.services import bus as bus_service
from launch.services import write_check
from launch.services.bus import serve_bus

pytestmark = pytest.mark.nats


async def stored(client: Client, *, within_s: float) -> None:
    """Return once a message is stored on the stream "kept", which is made if it is missing."""
    js = client.jetstream(timeout=1)
    async with asyncio.timeout(within_s):
        while True:
            try:
                await js.add_stream(name="kept", subjects=["kept"])
                await js.publish("kept", b"1")
            except nats.errors.Error:  # not yet
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_server_that_is_slow_is_left_alone(server: NatsServer, monkeypatch: pytest.MonkeyPatch):
    """One that is suspended answers nothing; one whose disk is full answers all but writes."""
    monkeypatch.setattr(write_check, "ANSWER_S", 0.1)
    monkeypatch.setattr(write_check, "PERIOD_S", 0.01)
    write, written = write_check._write, asyncio.Queue()

    async def noted(js: JetStreamContext) -> None:
        try:
            await write(js)
            written.put_nowait(True)
        except nats.errors.Error:
            written.put_nowait(False)
            raise

    async def writes(succeed: bool, times: int) -> None:
        async with asyncio.timeout(60):
            while times:
                times -= await written.get() == succeed

    monkeypatch.setattr(write_check, "_write", noted)
    process = psutil.Process(server.pid)
    checking = asyncio.create_task(write_check.until_it_cannot_store(server.url))
    await writes(True, 3)
    process.suspend()
    await writes(False, 3 * write_check.FAILURES)
    assert not checking.done()
    process.resume()
    await writes(True, 3)
    assert not checking.done()
    process.rlimit(psutil.RLIMIT_FSIZE, (0, process.rlimit(psutil.RLIMIT_FSIZE)[1]))
    async with asyncio.timeout(60):
        assert "timeout" in await checking


async def test_a_check_whose_server_is_away_prints_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    tries, noted = asyncio.Queue(), write_check._note

    async def counted(error: Exception) -> None:
        tries.put_nowait(error)
        await noted(error)

    monkeypatch.setattr(write_check, "PERIOD_S", 0.01)
    monkeypatch.setattr(write_check, "_note", counted)
    checking = asyncio.create_task(
        write_check.until_it_cannot_store(f"nats://127.0.0.1:{free_port('127.0.0.1')}")
    )
    async with asyncio.timeout(60):
        for _ in range(3):
            await tries.get()
    checking.cancel()
    await asyncio.wait([checking])
    assert not capfd.readouterr().err


async def bus_of(port: int) -> Client:
    """A client of the bus at this port, once it listens."""
    client = Client()
    async with asyncio.timeout(60):
        while not client.is_connected:
            try:
                await client.connect(
                    f"nats://127.0.0.1:{port}", max_reconnect_attempts=-1, reconnect_time_wait=0.1
                )
            except (OSError, nats.errors.Error):
                await asyncio.sleep(0.05)
    return client


def nats_server(directory: Path) -> psutil.Process:
    """The server that this process runs there."""
    [server] = [p for p in psutil.Process().children() if str(directory) in " ".join(p.cmdline())]
    return server


async def never(*_: object) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["all streams", "a stream"])
async def test_a_bus_that_could_not_write_stores_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, breaks: str
):
    other = "until_a_stream_breaks" if breaks == "all streams" else "until_it_cannot_store"
    monkeypatch.setattr(bus_service, other, never)
    port, stop = free_port("127.0.0.1"), asyncio.Event()
    serving = asyncio.create_task(serve_bus("127.0.0.1", port, tmp_path / "bus", stop))
    client = await bus_of(port)
    await stored(client, within_s=60)
    server = nats_server(tmp_path)
    server.rlimit(psutil.RLIMIT_FSIZE, (0, server.rlimit(psutil.RLIMIT_FSIZE)[1]))
    with pytest.raises(nats.errors.Error):
        await client.jetstream(timeout=1).publish("kept", b"2")
    if breaks == "a stream":  # for a moment
        server.rlimit(psutil.RLIMIT_FSIZE, 2 * server.rlimit(psutil.RLIMIT_FSIZE)[1:])
    async with asyncio.timeout(60):
        while server.is_running():  # noqa: ASYNC110 - of a process's end nobody sets an event
            await asyncio.sleep(0.05)
    await stored(client, within_s=60)
    await client.close()
    stop.set()
    await serving


async def test_a_bus_on_a_full_disk_keeps_its_server_until_there_is_room_and_starts_it_then(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    looks, full = asyncio.Queue(), [""]

    def lack_of_room(directory: Path) -> str:
        looks.put_nowait((directory, full[0]))
        return full[0]

    monkeypatch.setattr(bus_service, "lack_of_room", lack_of_room)
    monkeypatch.setattr(bus_service, "PERIOD_S", 0.01)
    port, stop = free_port("127.0.0.1"), asyncio.Event()
    serving = asyncio.create_task(serve_bus("127.0.0.1", port, tmp_path / "bus", stop))
    client = await bus_of(port)
    server, full[0] = nats_server(tmp_path), "the disk is full"
    async with asyncio.timeout(60):
        for _ in range(3):
            while await looks.get() != (tmp_path / "bus", "the disk is full"):
                pass
    assert server.is_running()
    assert client.is_connected
    full[0] = ""
    async with asyncio.timeout(60):
        while server.is_running():  # noqa: ASYNC110 - of another process nobody sets an event
            await asyncio.sleep(0.01)
    await stored(client, within_s=60)
    await client.close()
    stop.set()
    await serving
