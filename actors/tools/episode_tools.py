"""The tools of one episode: what they keep for it is opened by their first call, and closed with it."""

import asyncio
from collections.abc import Hashable, Iterable
from contextlib import AbstractAsyncContextManager
from time import monotonic

import structlog

from actors.episodes.task import JSON, Task
from actors.tools.base import (
    Arguments,
    EpisodeState,
    ExaminedTool,
    KeepsState,
    Tool,
    ToolError,
    ToolResult,
    WaitsForRoom,
)
from bus.waiting import cancelled

log = structlog.get_logger()
CLOSE_S = 10.0
"""Longest time that a tool may take to close what it kept for an episode."""


class EpisodeTools:
    """Carries out the calls of one episode: by the tools, or by what they keep for the episode."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._states: dict[Hashable, _HeldState] = {}
        self._left: list[asyncio.Task[None]] = []
        """States that failed and are being closed."""
        self.waited_s = 0.0
        """Time for which states waited until there was room for them."""

    async def call(self, tool: Tool, arguments: Arguments) -> ToolResult:
        """Carry out a call. Raises what the tool raises, or what opening its state raises."""
        if not isinstance(tool, KeepsState):
            return await tool.call(arguments)
        return await (await self._state(tool)).call(tool.name, arguments)

    async def room_for(self, tool: Tool) -> None:
        """Return once there is room for what a tool keeps, if it waits for that. Raises ToolError."""
        # isinstance of a Protocol takes as long as a quick call
        if not (hasattr(tool, "room_wait_s") and isinstance(tool, WaitsForRoom)):
            return
        began = monotonic()
        try:
            async with asyncio.timeout(tool.room_wait_s) as limit:
                await self._state(tool)
        except TimeoutError as error:
            if not limit.expired():  # the tool's own, such as of a service that it asks
                raise ToolError(f"{tool.name!r} did not open: {error!r}") from error
            raise ToolError(f"{tool.name!r} waited for {tool.room_wait_s:g} s and found no room") from error
        finally:
            self.waited_s += monotonic() - began

    async def examined(self, tools: Iterable[Tool]) -> dict[str, JSON]:
        """Return what tools find in their states, at the end. Raises ToolError."""
        examined = {one.episode: one for one in tools if isinstance(one, ExaminedTool) and one.is_examined}
        found: dict[str, JSON] = {}
        for tool in examined.values():
            found.update(await tool.examined(await self._state(tool)))
        return found

    async def _state(self, tool: KeepsState) -> EpisodeState:
        held = self._states.get(tool.episode)
        if held is None or held.is_over:
            held = self._states[tool.episode] = _HeldState(tool.episode(self._task), type(tool).__name__)
        return await held.state()

    def give_up(self, tool: Tool) -> bool:
        """Close what a tool keeps, since the tool hangs or broke; its next call opens it anew. Returns
        whether the tool kept anything."""
        held = self._states.pop(tool.episode, None) if isinstance(tool, KeepsState) else None
        if held is not None:
            self._left.append(asyncio.create_task(held.close(), name=f"close {tool.name}"))
        return held is not None

    async def close(self) -> None:
        """Close all that was opened; what fails, or takes too long, is logged."""
        await asyncio.gather(*self._left, *(held.close() for held in self._states.values()))


class _HeldState:
    """Holds a state open in a task of its own: a context manager wants to be left where it was entered."""

    def __init__(self, opening: AbstractAsyncContextManager[EpisodeState], name: str) -> None:
        self._name = name
        self._opened: asyncio.Future[EpisodeState] = asyncio.get_running_loop().create_future()
        self._close = asyncio.Event()
        self._holder = asyncio.create_task(self._hold(opening), name=f"state of {name}")

    @property
    def is_over(self) -> bool:
        return self._holder.done()

    async def state(self) -> EpisodeState:
        """Wait until the state is open. Raises what opening raised."""
        both: list[asyncio.Future[EpisodeState] | asyncio.Task[None]] = [self._opened, self._holder]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._holder.result()
        return self._opened.result()

    async def close(self) -> None:
        """Leave the state, by cancellation where it is not open yet or does not close in time."""
        self._close.set()
        try:
            if self._opened.done():
                await asyncio.wait([self._holder], timeout=CLOSE_S)
                if not self._holder.done():
                    log.warning("tool_does_not_close", tool=self._name, waited_s=CLOSE_S)
        finally:
            self._holder.cancel()  # also where this wait is cancelled
        await cancelled(self._holder)
        if not self._holder.cancelled() and (error := self._holder.exception()) is not None:
            log.info("tool_state_ended", tool=self._name, reason=repr(error))

    async def _hold(self, opening: AbstractAsyncContextManager[EpisodeState]) -> None:
        async with opening as state:
            self._opened.set_result(state)
            await self._close.wait()
