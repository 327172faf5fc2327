"""`launch dashboard`: serves the page until it is stopped."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from bus.errors import ConfigError
from launch.dashboard.access import Address, refuse_half_certificate, refuse_open_dashboard
from launch.dashboard.application import application
from launch.dashboard.open_runs import OpenRuns

LAST_S = 2
"""Longest time for answers that are under way when the dashboard ends."""


async def serve_dashboard(
    runs: OpenRuns, address: Address, stop: asyncio.Event, *, token: str | None = None,
    insecure: bool = False, ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Serve until `stop`; `ready` is called with the page's address once it can be asked for. Raises
    `ConfigError` for an address that is taken, or that would be open to everybody, and for a certificate that
    cannot be used."""
    refuse_half_certificate(address)
    refuse_open_dashboard(address, token, insecure=insecure)
    with _listening(address) as listener:
        address = replace(address, port=listener.getsockname()[1])
        config = uvicorn.Config(
            application(runs, address, token, stop),
            log_config=None,
            access_log=False,  # addresses name runs and trajectories
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=LAST_S,
            ssl_certfile=address.certificate,
            ssl_keyfile=address.certificate_key,
        )
        _load(config, address)  # before `ready`, so that a wrong certificate is told at once
        server = _DashboardServer(config)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            tasks.create_task(_end(server, serving, stop))
            ready(address.url)
        await runs.close()


def _load(config: uvicorn.Config, address: Address) -> None:
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"--certificate {address.certificate} with --certificate-key {address.certificate_key}: {error}"
        ) from error


async def _end(server: uvicorn.Server, serving: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True


class _DashboardServer(uvicorn.Server):
    """A server that leaves signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {address.host}:{address.port} ({error.strerror}): choose another --port, or 0 "
            "for any that is free"
        ) from error
    with listener:
        yield listener
