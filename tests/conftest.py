"""Fixtures that own the real nats-server and the connection of a test."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.server import NatsServer
from bus.topology import ensure

RUN = "test"
Connect = Callable[[str], AbstractAsyncContextManager[Bus]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A fresh nats-server of the test's own, which it may kill and start again."""
    running = NatsServer(tmp_path / "nats")
    await running.start()
    yield running
    with suppress(BusError):  # the test may have ended it
        await running.kill()  # ten times quicker than to stop it


@pytest.fixture
def connect(server: NatsServer) -> Connect:
    """Opens further connections to `server`, by name, as other processes would."""
    return lambda name: Bus.connect(BusConfig(url=server.url), RUN, name=name)


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    """A connection for run "test" with its streams, the consumers of two shards and its keys."""
    async with connect("test") as connected:
        await ensure(connected.js, connected.topology, shards=2)
        await connected.create_keys()
        yield connected
