"""A secured bus for tests, and connections to it by role."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

from bus.config import BusConfig
from bus.connection import Bus
from bus.security.credentials import load_credentials
from bus.server.nats_server import NatsServer
from bus.server.secure_directory import SecureDirectory
from bus.topology import ensure

As = Callable[..., AbstractAsyncContextManager[Bus]]


@asynccontextmanager
async def secured_bus(directory: Path, *runs: str) -> AsyncIterator[tuple[SecureDirectory, NatsServer]]:
    """Run a server with credentials for these runs."""
    secure = SecureDirectory(directory / "keys")
    server = NatsServer(directory / "nats", secure=secure)
    secure.make(runs, server.url)
    async with server:
        yield secure, server


@contextmanager
def lasting_bus(directory: Path, *runs: str) -> Iterator[SecureDirectory]:
    """Run a server with credentials for these runs, which several tests share one after another."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        bus = secured_bus(directory, *runs)
        secure, _ = runner.run(bus.__aenter__())
        yield secure
        runner.run(bus.__aexit__(None, None, None))


def by_role(secure: SecureDirectory, run: str = "mine") -> As:
    """Return what connects to a run as one of its roles."""

    def connect(role: str, run: str = run) -> AbstractAsyncContextManager[Bus]:
        path = secure.path / run / f"{role}.creds"
        return Bus.connect(BusConfig(url=load_credentials(path).url, creds=path), run, name=role)

    return connect


async def make_streams(connect: As, shards: int = 1) -> None:
    """Make the streams, consumers and keys of the run, as its storage does."""
    async with connect("storage") as bus:
        await bus.create_keys()
        await ensure(bus.js, bus.topology, shards=shards)


async def remove_streams(connect: As, *runs: str) -> None:
    """Remove what earlier tests left on a bus that lasts."""
    for run in runs:
        async with connect("operator", run) as bus:
            for stream in await bus.js.streams_info():
                await bus.js.delete_stream(stream.config.name)
