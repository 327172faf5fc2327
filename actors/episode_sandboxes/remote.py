"""Sandboxes on other hosts, behind a server that speaks `http_contract.py`."""

import asyncio
import os
import socket
from collections.abc import Mapping

import aiohttp

from actors.episode_sandboxes.base import Command, CommandResult
from actors.episode_sandboxes.http_contract import ENDED, FULL, command_body, result_of
from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON
from actors.settings.episode_sandboxes import RemoteSandboxes
from bus.errors import ConfigError, SchemaError
from bus.process.plugins import refuse_of_record

ASK_AGAIN_S = 1.0
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

    async def start(self, image: str | None) -> "RemoteSandbox":
        """Start a sandbox; a server without room is asked again. Raises ToolError."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    status, said = await self.ask(
                        "POST", "/sandboxes", {"image": image or self._config.image}
                    )
                    if status != FULL:
                        break
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError as error:
            limit = self._config.start_timeout_s
            raise ToolError(f"{self._config.url} had no room for a sandbox for {limit:g} s") from error
        if status != 201:
            raise ToolError(f"{self._config.url} starts no sandbox: {said.get('error', status)}")
        return RemoteSandbox(self, str(said["id"]))

    async def ask(
        self, method: str, path: str, body: JSON = None, *, timeout_s: float = GRACE_S
    ) -> tuple[int, Mapping[str, JSON]]:
        """Ask the server; return the status and what it says. Raises ToolError where it does not answer."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, f"{self._config.url}{path}", json=body) as answer,
            ):
                said = await answer.json() if answer.status != 204 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ToolError(f"{self._config.url} does not answer: {error!r}") from error
        return answer.status, said if isinstance(said, Mapping) else {}

    async def close(self) -> None:
        """End the connections to the server."""
        if self._session is not None:
            await self._session.close()


class RemoteSandbox:
    """One sandbox of a server."""

    def __init__(self, backend: RemoteBackend, sandbox_id: str) -> None:
        self._backend = backend
        self._path = f"/sandboxes/{sandbox_id}"

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolFailedError where the sandbox has ended, else ToolError."""
        timeout_s = command.timeout_s + GRACE_S
        status, said = await self._backend.ask(
            "POST", f"{self._path}/commands", command_body(command), timeout_s=timeout_s
        )
        if status == ENDED:
            raise ToolFailedError(f"the sandbox has ended: {said.get('error')}")
        if status != 200:
            raise ToolError(f"the sandbox failed: {said.get('error', status)}")
        try:
            return result_of(said)
        except SchemaError as error:
            raise ToolError(str(error)) from error

    async def listen(self, port: int) -> socket.socket:
        """Refuse: no server brings connections here. Raises ToolError."""
        raise ToolError(f"{self._path}: a sandbox of another host brings no connections to port {port} here")

    async def close(self) -> None:
        """Have the server end the sandbox, which it would do by itself after a while."""
        await self._backend.ask("DELETE", self._path)
