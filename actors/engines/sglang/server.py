"""Where the engine's server comes from: a process of our own, or a URL that somebody else keeps alive."""

import asyncio
import time
from pathlib import Path
from typing import Protocol

import structlog

from actors.config import SglangEngineConfig
from actors.engines.sglang.client import SglangClient, UnreachableError
from actors.engines.sglang.process import ServerProcess
from actors.engines.sglang.settings import interpreter, server_environment, server_settings
from bus.errors import EngineError
from bus.server import free_port

log = structlog.get_logger()
HOST = "127.0.0.1"
POLL_S = 0.25


class Server(Protocol):
    """The server of an engine, or the two of a pair."""

    async def start(self) -> SglangClient:
        """Start it or find it; who asks closes the client."""

    async def until_ready(self, client: SglangClient) -> None:
        """Return when it serves. Raises EngineError or ConfigError when it does not."""

    async def ended(self, *, within_s: float) -> str:
        """Wait so long; why it ended, or an empty string when it has not."""

    async def kill(self) -> None:
        """End it, whatever state it is in, unless it is not ours."""


class OwnServer:
    """A server that this process starts."""

    def __init__(self, config: SglangEngineConfig, model: Path, log_file: Path, number: int) -> None:
        self.process: ServerProcess | None = None
        self._config = config
        self._model = model
        self._log_file = log_file
        self._number = number

    async def start(self) -> SglangClient:
        """Start a process, with arbitrary weights."""
        port = free_port(HOST)
        settings = server_settings(self._config, self._model, host=HOST, port=port, number=self._number)
        python = interpreter(self._config)
        environment = server_environment(self._config, settings, python)
        self.process = await ServerProcess.start(python, settings, environment, self._log_file)
        return SglangClient.connect(f"http://{HOST}:{port}")

    async def until_ready(self, client: SglangClient) -> None:
        """Return when it has generated a token; it is killed when it does not in time."""
        assert self.process is not None, "it is started first"
        deadline = time.monotonic() + self._config.start_timeout_s
        while not self.process.ended:
            if await client.healthy(self._config.health_timeout_s):
                return
            if time.monotonic() > deadline:
                await self.process.kill()
                raise EngineError(
                    f"the SGLang server did not serve within actors.engine.start_timeout_s="
                    f"{self._config.start_timeout_s:g}. The end of {self._log_file}:\n{self.process.tail()}"
                )
            await self.ended(within_s=POLL_S)
        failure = self.process.failure()
        await self.process.kill()  # what it started may live on
        raise failure

    async def ended(self, *, within_s: float) -> str:
        """Why its process ended, as soon as it has."""
        process = self.process
        assert process is not None, "it is started first"
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            return ""
        return f"it ended with status {process.status}: see {self._log_file}"

    async def kill(self) -> None:
        """End all of its processes."""
        if self.process is not None:
            await self.process.kill()


class AttachedServer:
    """A server that runs already: it is waited for, watched, and brought to our weights."""

    def __init__(self, config: SglangEngineConfig) -> None:
        self._config = config

    async def start(self) -> SglangClient:
        """Say how to reach it."""
        assert self._config.url is not None, "the engine makes one for a URL only"
        return SglangClient.connect(self._config.url)

    async def until_ready(self, client: SglangClient) -> None:
        """Return when it answers; it may be starting, or starting again.

        An actor that was killed in an update left that open, so that no other could begin, and the server
        paused, so that it would generate nothing."""
        deadline = time.monotonic() + self._config.start_timeout_s
        waiting = False
        while True:
            try:
                await client.weight_version()
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise
                if not waiting:
                    log.warning("sglang_waited_for", url=client.url, reason=str(error))
                waiting = True
                await asyncio.sleep(POLL_S)
            else:
                await client.end_open_update()
                await client.resume()
                return

    async def ended(self, *, within_s: float) -> str:
        """Wait; only health checks can tell."""
        await asyncio.sleep(within_s)
        return ""

    async def kill(self) -> None:
        """Leave it alone."""
