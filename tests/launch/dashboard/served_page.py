"""A server of the page."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from bus.errors import ConfigError
from launch.dashboard.access import Address
from launch.dashboard.open_runs import OpenRuns
from launch.dashboard.server import serve_dashboard
from launch.settings.run_config import RunConfig
from tests.storage.serving import running

TOKEN = "a token that nobody guesses"
ANY_PORT = Address(port=0)


def no_bus(run: str) -> RunConfig:
    raise ConfigError(f"nobody knows the bus of {run}")


@asynccontextmanager
async def served(
    runs: OpenRuns, listening: Address = ANY_PORT, *, token: str | None = None
) -> AsyncIterator[str]:
    """Serve the runs at a port of its own; yields the address."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    work = partial(serve_dashboard, runs, listening, token=token, ready=address.set_result)
    async with running(work) as serving, asyncio.timeout(180):
        await asyncio.wait((address, serving), return_when=asyncio.FIRST_COMPLETED)
        yield address.result()
