"""A server of sandboxes for actors on other hosts, which speaks `http_contract.py`:

    SLUICE_SANDBOX_TOKEN=... python -m actors.episode_sandboxes.server SETTINGS.toml

The file has the fields of `SandboxServerConfig`."""

import asyncio
import hmac
import os
import secrets
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from aiohttp import web

from actors.episode_sandboxes.base import LARGEST_SNAPSHOT, EpisodeSandbox, host_and_port
from actors.episode_sandboxes.build import build_backend
from actors.episode_sandboxes.http_contract import (
    ENDED,
    FAILED,
    FULL,
    command_of,
    in_parts,
    limits_of,
    result_line,
)
from actors.episode_sandboxes.pool import SandboxPool
from actors.episode_sandboxes.relay import copy
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import SandboxServerConfig
from bus.errors import ConfigError, SchemaError, SluiceError
from bus.waiting import cancelled

log = structlog.get_logger()
LOOK_S = 1.0
LARGEST_BODY = LARGEST_SNAPSHOT + (1 << 20)


@dataclass(slots=True)
class _Lent:
    sandbox: EpisodeSandbox
    opened: AsyncExitStack
    used_s: float = field(default_factory=time.monotonic)
    commands: int = 0


class SandboxServer:
    """Lends sandboxes to who has the token, and ends those that nobody uses any more."""

    def __init__(self, config: SandboxServerConfig) -> None:
        """Raises ConfigError where the back end does not work here, or there is no token."""
        token = os.environ.get(config.token_variable)
        if not token:
            raise ConfigError(f"set the variable {config.token_variable} to a token that clients give")
        self._config = config
        self._expected = f"Bearer {token}".encode()
        self._usual = limits_of({}, config)
        self._pool = SandboxPool(build_backend(config.backend), config, at_once=config.at_once)
        self._lent: dict[str, _Lent] = {}
        self._starting = 0
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(self, stop: asyncio.Event) -> None:
        app = web.Application(middlewares=[self._in_shape], client_max_size=LARGEST_BODY)
        app.router.add_post("/sandboxes", self._start)
        app.router.add_post("/sandboxes/{id}/commands", self._run)
        app.router.add_delete("/sandboxes/{id}", self._end)
        # A client that leaves ends its command.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, self._config.host, self._config.port).start()
        self.port.set_result(int(runner.addresses[0][1]))
        log.info("sandboxes_ready", host=self._config.host, port=self.port.result())
        ending = asyncio.create_task(self._end_unused(), name="unused sandboxes")
        try:
            await stop.wait()
        finally:
            await cancelled(ending)
            await runner.cleanup()
            await asyncio.gather(*map(_ended, self._lent.values()))
            await self._pool.close()

    async def _start(self, request: web.Request) -> web.Response:
        body = await request.json()
        body = body if isinstance(body, dict) else {}
        image, limits, gateway = body.get("image"), limits_of(body, self._usual), body.get("gateway")
        gateway = None if gateway is None else str(gateway)
        if len(self._lent) + self._starting >= self._config.at_once:
            return web.json_response({"error": f"{self._config.at_once} sandboxes are lent"}, status=FULL)
        self._starting += 1
        opened = AsyncExitStack()
        try:
            sandbox = await opened.enter_async_context(
                self._pool.sandbox(
                    None if image is None else str(image), None if limits == self._usual else limits, gateway
                )
            )
            reached = None if gateway is None else await _reached(sandbox, gateway, opened)
        except BaseException:
            await opened.aclose()
            raise
        finally:
            self._starting -= 1
        name = secrets.token_hex(16)
        self._lent[name] = _Lent(sandbox, opened)
        return web.json_response({"id": name, "gateway": reached}, status=201)

    async def _run(self, request: web.Request) -> web.StreamResponse:
        lent = self._lent.get(request.match_info["id"])
        if lent is None:
            return web.json_response({"error": "there is no such sandbox any more"}, status=ENDED)
        command = command_of(await request.read())
        lent.commands += 1
        try:
            result = await lent.sandbox.run(command)
            answer = web.StreamResponse()
            await answer.prepare(request)
            async for part in in_parts(result_line(result), result.stdout, result.stderr):
                await answer.write(part)
            return answer
        finally:
            lent.commands -= 1
            lent.used_s = time.monotonic()

    async def _end(self, request: web.Request) -> web.Response:
        if (lent := self._lent.pop(request.match_info["id"], None)) is not None:
            await lent.opened.aclose()
        return web.Response(status=204)

    async def _end_unused(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._config.idle_s))
            oldest = time.monotonic() - self._config.idle_s
            unused = [name for name, one in self._lent.items() if not one.commands and one.used_s < oldest]
            if unused:
                log.info("unused_sandboxes_ended", idle_s=self._config.idle_s, count=len(unused))
            await asyncio.gather(*(_ended(self._lent.pop(name)) for name in unused))

    @web.middleware
    async def _in_shape(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Ask for the token, and answer errors as the contract says."""
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._expected):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except ToolFailedError as error:
            return web.json_response({"error": str(error)}, status=ENDED)
        except ToolError as error:
            return web.json_response({"error": str(error)}, status=FAILED)
        except (SchemaError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)


async def _reached(sandbox: EpisodeSandbox, gateway: str, opened: AsyncExitStack) -> str:
    """Have a sandbox reach a gateway until `opened` is closed; return the address for its commands. Raises
    ToolError, and ValueError for what is no address."""
    place, tls = host_and_port(gateway), gateway.startswith("https:") or None
    base, listening = await sandbox.running.reach(gateway)
    if listening is None:
        return base

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection(*place, ssl=tls)
        except OSError as error:
            log.warning("gateway_is_not_reached", gateway=gateway, reason=str(error))
            writer.close()
            return
        await asyncio.gather(copy(reader, far[1]), copy(far[0], writer))

    serving = (
        await asyncio.start_unix_server(relay, sock=listening)
        if listening.family == socket.AF_UNIX
        else (await asyncio.start_server(relay, sock=listening))
    )
    opened.callback(serving.close)
    return base + urlsplit(gateway).path


async def _ended(lent: _Lent) -> None:
    """End a sandbox that its client does not end; what its host says against it is logged."""
    try:
        await lent.opened.aclose()
    except ToolError as error:
        log.warning("sandbox_is_not_ended", reason=str(error))


async def _main(path: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    settings = tomllib.loads(await asyncio.to_thread(path.read_text))
    await SandboxServer(SandboxServerConfig.model_validate(settings)).serve(stop)


if __name__ == "__main__":
    try:
        asyncio.run(_main(Path(sys.argv[1])))
    except (SluiceError, ValueError, OSError, IndexError) as error:
        sys.exit(f"sandboxes are not served: {error}")
