"""Tools of servers that speak the Model Context Protocol (package `mcp`, optional).

A server's connection lives in a thread with an event loop of its own: the tools are known before the actor's
loop runs, and a connection must be closed by the task that opened it."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from threading import Thread
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client._transport import TransportStreams
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, CallToolResult, TextContent, Tool

from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON
from actors.settings.programs import with_own_python
from actors.settings.tools import McpConfig
from actors.tools.base import Arguments, ToolResult
from bus.errors import ConfigError

END_TIMEOUT_S = 10.0


class McpServer:
    """A connection to one server, which is opened again after it broke. It ends with its owner."""

    def __init__(self, config: McpConfig) -> None:
        """Connect, and ask for the tools. Raises ConfigError where that fails."""
        self._config = config
        self._connection = _Connection(config)
        self._end = weakref.finalize(self, self._connection.end)
        try:
            found = self._connection.tools(config.start_timeout_s)
        # what a server and its transport raise is open; a wrong one is wrong at the start
        except Exception as error:
            self._end()
            raise ConfigError(
                f"MCP server {config.server}: no list of its tools within {config.start_timeout_s:g} s "
                f"({_reason(error)}): check command and url in actors.environment.tools"
            ) from error
        self._found = self._chosen(found)

    @property
    def tools(self) -> list["McpTool"]:
        """The tools that may be called; each keeps the connection open."""
        return [McpTool(self, tool) for tool in self._found]

    def _chosen(self, found: Sequence[Tool]) -> list[Tool]:
        names = [tool.name for tool in found]
        if missing := [name for name in self._config.allowed if name not in names]:
            there = ", ".join(names)
            raise ConfigError(
                f"MCP server {self._config.server} has no tool {missing[0]}; there are: {there}"
            )
        return [tool for tool in found if not self._config.allowed or tool.name in self._config.allowed]

    async def call(self, name: str, arguments: Arguments) -> ToolResult:
        """Call one of the server's tools. Raises ToolFailedError where the server or its connection failed,
        which it may have done because of the arguments."""
        call = asyncio.run_coroutine_threadsafe(
            self._connection.call(name, dict(arguments)), self._connection.loop
        )
        try:
            return _result(await asyncio.wrap_future(call))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(f"error: {error.message}", failed=True)
            raise ToolFailedError(f"MCP server {self._config.server}: {error.message}") from error

    async def close(self) -> None:
        """End the connection, and a server that was started for it."""
        await asyncio.to_thread(self._end)


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        self.name = tool.name
        self.description = tool.description or tool.title or tool.name
        self.parameters: Mapping[str, JSON] = tool.input_schema
        self._server = server

    async def call(self, arguments: Arguments) -> ToolResult:
        """Have the server do it. Raises ToolError where the server failed."""
        return await self._server.call(self.name, arguments)

    async def close(self) -> None:
        """End the connection to the server, which all its tools share."""
        await self._server.close()


class _Connection:
    """A thread with an event loop, and in it at most one open session."""

    def __init__(self, config: McpConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self._config = config
        self._opening = asyncio.Lock()
        self._opened: asyncio.Future[ClientSession] | None = None
        """The session of `_holder`, once it is open."""
        self._holder: asyncio.Task[None] | None = None
        self._thread = Thread(target=self.loop.run_forever, name=f"mcp {config.server}", daemon=True)
        self._thread.start()

    def tools(self, timeout_s: float) -> Sequence[Tool]:
        """Connect and return the server's tools, from another thread; raises TimeoutError and what fails."""
        listed = asyncio.wait_for(self._tools(), timeout_s)
        return asyncio.run_coroutine_threadsafe(listed, self.loop).result()

    async def _tools(self) -> Sequence[Tool]:
        session = await self._open()
        return (await session.list_tools()).tools

    async def call(self, name: str, arguments: dict[str, JSON]) -> CallToolResult:
        session = await self._open()
        holder = self._holder
        try:
            result = await session.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await _ended(holder)  # the next call connects again
            raise
        if not isinstance(result, CallToolResult):
            raise ToolError(f"MCP server {self._config.server} answered {name} with {type(result).__name__}")
        return result

    async def _open(self) -> ClientSession:
        """Return the session; open one where there is none, or where it broke.

        A call that is cancelled meanwhile leaves the opening to the next one, which waits for the same."""
        async with self._opening:
            if self._opened is None or self._holder is None or self._holder.done():
                self._opened = self.loop.create_future()
                self._holder = self.loop.create_task(self._hold(self._opened))
            both: list[asyncio.Future[Any]] = [self._opened, self._holder]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self._opened.done():
                self._holder.result()  # raises what opening raised
            return self._opened.result()

    async def _hold(self, opened: "asyncio.Future[ClientSession]") -> None:
        """Keep a session open until this task is cancelled: what opened it has to close it."""
        async with AsyncExitStack() as parts:
            streams = await parts.enter_async_context(_transport(self._config))
            session = await parts.enter_async_context(ClientSession(*streams))
            await session.initialize()
            opened.set_result(session)
            await asyncio.Event().wait()

    def end(self) -> None:
        """Close the session, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(END_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_TIMEOUT_S)
        self.loop.close()

    async def _close(self) -> None:
        await _ended(self._holder)


async def _ended(holder: asyncio.Task[None] | None) -> None:
    """Close the session that a task holds; another may be open by now."""
    if holder is not None:
        holder.cancel()
        await asyncio.wait([holder])


def _transport(config: McpConfig) -> AbstractAsyncContextManager[TransportStreams]:
    if config.url is not None:
        return streamable_http_client(config.url)
    command, *arguments = with_own_python(config.command)
    return stdio_client(StdioServerParameters(command=command, args=arguments, env=dict(config.environment)))


def _result(result: CallToolResult) -> ToolResult:
    """Return the texts of an answer; what is no text is named by its kind."""
    parts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    return ToolResult("\n".join(parts), failed=bool(result.is_error))


def _reason(error: BaseException) -> str:
    """Return what went wrong, of several things the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
