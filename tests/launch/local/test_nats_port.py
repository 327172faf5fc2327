"""nats-server tells its own numbers at a port of the user's choice."""

import asyncio
import json
import socket
import sys
import time
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from bus.errors import SluiceError
from bus.server.nats_server import HTTP_HOST, free_port
from launch.local.local import _bus_listens, _bus_part, _run_parts
from launch.local.supervisor import Part, Supervisor
from launch.services.bus import serve_bus
from launch.settings.run_config import MonitoringConfig, resolve
from storage.disk.run_directory import RunDirectory


def numbers(port: int) -> dict:
    """What the server says, once it listens."""
    while True:
        try:
            with urlopen(f"http://{HTTP_HOST}:{port}/varz", timeout=20) as answer:
                return json.load(answer)
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.05)


def test_a_local_run_gives_the_port_to_its_bus_alone(tmp_path: Path):
    run = RunDirectory(tmp_path, "test")
    config = resolve({"data": {"task": "sort"}, "monitoring": {"nats_port": 8222}})
    assert _bus_part(config, run, 4222).command[-2:] == ("--monitoring.nats-port", "8222")
    assert not [part.name for part in _run_parts(config, run) if "8222" in part.command]
    without = resolve({"data": {"task": "sort"}})
    assert "--monitoring.nats-port" not in _bus_part(without, run, 4222).command


@pytest.mark.nats
async def test_the_server_of_launch_bus_tells_its_numbers(tmp_path: Path):
    port, stop = free_port(HTTP_HOST), asyncio.Event()
    monitoring = MonitoringConfig(nats_port=port)
    serving = asyncio.create_task(
        serve_bus("127.0.0.1", free_port("127.0.0.1"), tmp_path, stop, monitoring=monitoring)
    )
    try:
        async with asyncio.timeout(60):
            assert (await asyncio.to_thread(numbers, port))["connections"] >= 0
    finally:
        stop.set()
        await serving


STARTS = """\
import subprocess, sys
sys.exit(subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait())
"""
LISTENS = """\
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()  # until the process that started it has ended
"""


async def test_another_server_at_the_port_of_a_launchs_bus_is_not_taken_for_that(tmp_path: Path):
    python, port = (sys.executable, "-c"), free_port("127.0.0.1")
    bus = Part("bus", (*python, STARTS, *python, LISTENS, str(port)))

    async def start() -> None:
        supervisor = Supervisor(tmp_path)
        try:
            await supervisor.start(bus, ready=partial(_bus_listens, supervisor, port))
        finally:
            await supervisor.end()

    with (
        socket.create_server(("127.0.0.1", port)),  # the bus ends, since it cannot listen there
        pytest.raises(SluiceError, match="before it was ready"),
    ):
        await start()
    await start()
