"""Sandboxes on other hosts, behind a server that speaks `http_contract.py`."""

import asyncio
import json
import os
import socket

import aiohttp

from actors.episode_sandboxes.base import Command, CommandResult
from actors.episode_sandboxes.http_contract import ENDED, FULL, command_line, in_parts, result_of, start_body
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import RemoteSandboxes, SandboxLimits
from bus.errors import ConfigError, SchemaError
from bus.process.plugins import refuse_of_record

ASK_AGAIN_S = 1.0
SHOWN = 200
GRACE_S = 60.0
"""Longest time until the server answers, above a command's own."""


class RemoteBackend:
    """Asks a server for sandboxes. Raises ConfigError where its token is not in the environment."""

    def __init__(self, config: RemoteSandboxes) -> None:
        refuse_of_record(f"the sandboxes' url={config.url}", config.url)
        token = os.environ.get(config.token_variable)
        if not token:
            raise ConfigError(
                f"sandboxes at {config.url}: the variable {config.token_variable} holds no token: set it to "
                "that of the server"
            )
        self._config = config
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def start(
        self, image: str | None, limits: SandboxLimits, gateway: str | None = None
    ) -> "RemoteSandbox":
        """Start a sandbox; a server without room is asked again. Raises ToolError."""
        wish = start_body(image, limits, gateway)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    status, said = await self.ask(
                        "POST", "/sandboxes", wish, timeout_s=self._config.start_timeout_s
                    )
                    if status != FULL:
                        break
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError as error:
            limit = self._config.start_timeout_s
            raise ToolError(f"{self._config.url} has lent no sandbox after {limit:g} s") from error
        if status != 201:
            raise ToolError(f"{self._config.url} starts no sandbox: {_error(said) or status}")
        started = json.loads(said)
        return RemoteSandbox(self, str(started["id"]), str(started.get("gateway")))

    async def ask(
        self, method: str, path: str, *body: bytes, timeout_s: float = GRACE_S
    ) -> tuple[int, bytes]:
        """Ask the server; return the status and what it says. Raises ToolError where it does not answer."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        sent = in_parts(*body) if body else None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, f"{self._config.url}{path}", data=sent) as answer,
            ):
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ToolError(f"{self._config.url} does not answer: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class RemoteSandbox:
    """One sandbox of a server."""

    def __init__(self, backend: RemoteBackend, sandbox_id: str, gateway: str) -> None:
        self._backend = backend
        self._path = f"/sandboxes/{sandbox_id}"
        self._gateway = gateway

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolFailedError where the sandbox has ended, else ToolError."""
        timeout_s = command.timeout_s + GRACE_S
        status, said = await self._backend.ask(
            "POST", f"{self._path}/commands", command_line(command), command.stdin, timeout_s=timeout_s
        )
        if status == ENDED:
            raise ToolFailedError(f"the sandbox has ended: {_error(said)}")
        if status != 200:
            raise ToolError(f"the sandbox failed: {_error(said) or status}")
        try:
            return result_of(said)
        except SchemaError as error:
            raise ToolError(str(error)) from error

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        return self._gateway, None

    async def close(self) -> None:
        await self._backend.ask("DELETE", self._path)


def _error(body: bytes) -> str:
    """Return why a server refuses, or the beginning of what it says in another way."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, TypeError, KeyError):
        return body[:SHOWN].decode(errors="replace")
