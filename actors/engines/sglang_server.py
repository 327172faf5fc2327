"""Where the engine's server comes from: a process of our own, or a URL that somebody else keeps alive."""

import asyncio
import time
from pathlib import Path
from typing import Protocol

from actors.config import SglangEngineConfig
from actors.engines.sglang_client import SglangClient
from actors.engines.sglang_process import ServerProcess
from actors.engines.sglang_settings import interpreter, server_environment, server_settings
from actors.engines.sglang_weights import HeldWeights
from bus.errors import EngineError
from bus.server import free_port

HOST = "127.0.0.1"
POLL_S = 0.25


class Server(Protocol):
    """One server after another, of which at most one lives."""

    lives: int
    """How many there have been."""
    has_weights: bool
    """Whether it came up with the newest weights, so that none need be sent."""

    async def start(self) -> str:
        """Begin a life; returns the URL."""

    async def until_ready(self, client: SglangClient) -> None:
        """Return when it serves. Raises EngineError or ConfigError when it does not."""

    async def ended(self, *, within_s: float) -> str:
        """Wait so long; why it ended, or an empty string when it has not."""

    async def kill(self) -> None:
        """End it, whatever state it is in, unless it is not ours."""


class OwnServer:
    """A server that this process starts."""

    has_weights = True

    def __init__(self, config: SglangEngineConfig, held: HeldWeights, log_file: Path) -> None:
        self.lives = 0
        self.process: ServerProcess | None = None
        self._config = config
        self._held = held
        self._log_file = log_file

    async def start(self) -> str:
        """Start a process; its `policy_version` is that of the weights that are held."""
        self.lives += 1
        port = free_port(HOST)
        held = self._held
        settings = server_settings(
            self._config, held.directory, host=HOST, port=port, policy_version=held.policy_version
        )
        environment = server_environment(self._config, settings)
        python = interpreter(self._config)
        self.process = await ServerProcess.start(python, settings, environment, self._log_file)
        return f"http://{HOST}:{port}"

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
    """A server that runs already: it is watched, waited for when it is away, and brought to our weights."""

    has_weights = False

    def __init__(self, config: SglangEngineConfig) -> None:
        self.lives = 0
        self._config = config

    async def start(self) -> str:
        """Look at the URL."""
        self.lives += 1
        assert self._config.url is not None, "the engine makes one for a URL only"
        return self._config.url

    async def until_ready(self, client: SglangClient) -> None:
        """Return when it answers as SGLang. A server that was there before is waited for."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while True:
            try:
                await client.weight_version()
            except EngineError:
                if self.lives == 1 or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_S)
            else:
                return

    async def ended(self, *, within_s: float) -> str:
        """Wait; only health checks can tell."""
        await asyncio.sleep(within_s)
        return ""

    async def kill(self) -> None:
        """Leave it alone."""
