"""A secured bus for tests, and connections to it by role."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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


def by_role(secure: SecureDirectory, run: str = "mine") -> As:
    """Return what connects to a run as one of its roles."""

    def connect(role: str, run: str = run) -> AbstractAsyncContextManager[Bus]:
        path = secure.path / run / f"{role}.creds"
        return Bus.connect(BusConfig(url=load_credentials(path).url, creds=path), run, name=role)

    return connect


async def make_streams(connect: As) -> None:
    """Make the streams, consumers and keys of the run, as its storage does."""
    async with connect("storage") as bus:
        await bus.create_keys()
        await ensure(bus.js, bus.topology, shards=1)
