"""Tools of servers that speak the Model Context Protocol (package `mcp`, optional). Sessions live in a thread
with an event loop of its own: the tools are known before the actor's loop runs, and a session must be closed
by the task that opened it."""

import asyncio
import json
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import structlog
from mcp import ClientSession, StdioServerParameters
from mcp.client._transport import TransportStreams
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from actors.episodes.errors import ToolError, ToolFailedError
from actors.episodes.task import JSON, Task
from actors.settings.agents import with_own_python
from actors.settings.tools import McpConfig
from actors.tools.base import Arguments, ToolResult
from bus.errors import ConfigError, leaves
from bus.waiting import cancelled

log = structlog.get_logger()
T = TypeVar("T")
END_TIMEOUT_S = 10.0
PING_S = 5.0
"""Longest time that a server may take to say that it is there, after a call took too long."""


class McpServer:
    """One server: a session that episodes share, or one of each episode. All end with their owner."""

    def __init__(self, config: McpConfig) -> None:
        """Connect, and ask for the tools. Raises ConfigError where that fails."""
        self._config = config
        self._thread = _LoopThread(config)
        self._shared = _Session(config)
        self._end = weakref.finalize(self, self._thread.end, self._shared)
        try:
            found = self._thread.wait_for(self._first_tools())
        # what a server and its transport raise is open; a wrong one is wrong at the start
        except Exception as error:
            self._end()
            first = next(leaves(error))
            raise ConfigError(
                f"MCP server {config.server}: no list of its tools within {config.start_timeout_s:g} s "
                f"({type(first).__name__}: {first}): check command and url in actors.environment.tools"
            ) from error
        self._found = self._chosen(found)

    async def _first_tools(self) -> Sequence[Tool]:
        found = await asyncio.wait_for(self._shared.tools(), self._config.start_timeout_s)
        if self._config.sessions == "episode":
            await self._shared.close()
        return found

    @property
    def tools(self) -> list["McpTool"]:
        """The tools that may be called; each keeps the connection open."""
        kind = McpTool if self._config.sessions == "shared" else McpEpisodeTool
        return [kind(self, tool) for tool in self._found]

    def _chosen(self, found: Sequence[Tool]) -> list[Tool]:
        names = [tool.name for tool in found]
        if missing := [name for name in self._config.allowed if name not in names]:
            there = ", ".join(names)
            raise ConfigError(
                f"MCP server {self._config.server} has no tool {missing[0]}; there are: {there}"
            )
        return [tool for tool in found if not self._config.allowed or tool.name in self._config.allowed]

    @asynccontextmanager
    async def episode(self, _: Task) -> AsyncIterator["McpSession"]:
        """Have a session of its own while inside."""
        session = McpSession(self, _Session(self._config))
        try:
            yield session
        finally:
            await self._thread.run(session.opened.close())

    async def call(self, name: str, arguments: Arguments, session: "_Session | None" = None) -> ToolResult:
        """Call one of the server's tools in a session, or else in the shared one. Raises ToolFailedError
        where the server or its connection failed, which it may have done because of the arguments."""
        try:
            return _result(await self._thread.run((session or self._shared).call(name, dict(arguments))))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(f"error: {error.message}", failed=True)
            raise ToolFailedError(f"MCP server {self._config.server}: {error.message}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self._end)


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        self.name = tool.name
        self.description = tool.description or tool.title or tool.name
        self.parameters: Mapping[str, JSON] = tool.input_schema
        self._server = server

    async def call(self, arguments: Arguments) -> ToolResult:
        return await self._server.call(self.name, arguments)

    async def close(self) -> None:
        await self._server.close()


class McpEpisodeTool(McpTool):
    """One tool of a server with which each episode has a session of its own."""

    def __init__(self, server: McpServer, tool: Tool) -> None:
        super().__init__(server, tool)
        self.episode = server.episode


@dataclass(frozen=True, slots=True)
class McpSession:
    """The session of one episode."""

    server: McpServer
    opened: "_Session"

    async def call(self, tool: str, arguments: Arguments) -> ToolResult:
        """Have the server do it. Raises ToolError where the server failed."""
        return await self.server.call(tool, arguments, self.opened)


class _LoopThread:
    """A thread with an event loop, in which the sessions live."""

    def __init__(self, config: McpConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"mcp {config.server}", daemon=True)
        self._thread.start()

    def wait_for(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def end(self, session: "_Session") -> None:
        asyncio.run_coroutine_threadsafe(session.close(), self._loop).result(END_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)
        self._loop.close()


class _Session:
    """A session that is opened by its first use, and again after it broke. It lives in one loop."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._opening = asyncio.Lock()
        self._opened: asyncio.Future[ClientSession] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._calls: Counter[asyncio.Task[None] | None] = Counter()
        """Calls in progress, by the holder of their session."""
        self._pings: set[asyncio.Task[None]] = set()

    async def tools(self) -> Sequence[Tool]:
        """Return the tools of all pages of the server's list."""
        session, found = await self._open(), list[Tool]()
        page = await session.list_tools()
        found += page.tools
        while page.next_cursor:  # some servers end their list with an empty cursor
            page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
            found += page.tools
        return found

    async def call(self, name: str, arguments: dict[str, JSON]) -> CallToolResult:
        session = await self._open()
        holder = self._holder
        self._calls[holder] += 1
        try:
            result = await session.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await _ended(holder)  # the next call connects again
            raise
        except asyncio.CancelledError:
            ping = asyncio.create_task(self._leave_if_hung(session, holder), name="mcp ping")
            self._pings.add(ping)
            ping.add_done_callback(self._pings.discard)
            raise
        finally:
            self._calls[holder] -= 1
        if not isinstance(result, CallToolResult):
            raise ToolError(f"MCP server {self._config.server} answered {name} with {type(result).__name__}")
        return result

    async def _leave_if_hung(self, session: ClientSession, holder: asyncio.Task[None] | None) -> None:
        """Leave a session whose server answers no ping: the next call opens another one, and this one ends
        once the calls in progress have ended."""
        try:
            async with asyncio.timeout(PING_S):
                await session.send_ping()
        except (TimeoutError, MCPError):
            log.warning("mcp_server_hangs", server=self._config.server)
            if self._holder is holder:
                self._holder = None
            while self._calls[holder] and holder is not None and not holder.done():
                await asyncio.wait([holder], timeout=PING_S)
            await _ended(holder)

    async def _open(self) -> ClientSession:
        """Return the session; open one where there is none, or where it broke. A call that is cancelled
        meanwhile leaves the opening to the next one, which waits for the same."""
        async with self._opening:
            if self._opened is None or self._holder is None or self._holder.done():
                self._opened = asyncio.get_running_loop().create_future()
                self._holder = asyncio.create_task(self._hold(self._opened))
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

    async def close(self) -> None:
        await cancelled(*self._pings)
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
    """Return the texts of an answer, those of files in it too, or its structured content where it has nothing
    else; what is no text is named by its kind."""
    text = "\n".join(map(_text, result.content))
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(text, failed=bool(result.is_error))


def _text(part: ContentBlock) -> str:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return part.resource.text
    return f"[{part.type} {part.uri}]" if isinstance(part, ResourceLink) else f"[{part.type}]"
