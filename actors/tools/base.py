"""Contract of tools: what they are called with, what they return and how they fail."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from actors.episodes.errors import ToolError
from actors.episodes.task import JSON, Task

__all__ = [
    "Arguments", "EndsCalls", "EpisodeState", "ExaminedTool", "KeepsState", "Tool", "ToolError", "ToolResult",
    "WaitsForRoom", "function_schema", "shortened",
]  # fmt: skip
Arguments = Mapping[str, JSON]
"""Arguments of a call, by name, as its JSON had them."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers the model."""

    text: str
    failed: bool = False
    """True where the call was wrong, such as a division by zero: the model reads why, and it is counted."""


class Tool(Protocol):
    """Something that a model may call. One instance serves many rollouts at once."""

    name: str
    """Name by which the model calls it."""
    description: str
    """What the tool does and when to call it, for the model."""
    parameters: Mapping[str, JSON]
    """JSON schema of its arguments: an object."""

    async def call(self, arguments: Arguments) -> ToolResult:
        """Do what is asked; `arguments` fit `parameters`. What the model did wrong is a result that says so.
        Raises ToolError for whatever is not the model's fault: the episode is then never trained as 0."""

    async def close(self) -> None:
        """Free what the tool holds."""


class EpisodeState(Protocol):
    """What one or more tools keep for one episode, such as files or a session at a server."""

    async def call(self, tool: str, arguments: Arguments) -> ToolResult:
        """Do what `Tool.call` does, for the tool of this name; calls of one turn may come at once. A call
        that raises, or takes too long, ends the state; the next one finds a new state."""


@runtime_checkable
class KeepsState(Protocol):
    """A tool that keeps a state for each episode, which then carries out its calls in place of `call`."""

    def episode(self, task: Task) -> AbstractAsyncContextManager[EpisodeState]:
        """Open the state of one episode, until the episode ends. Tools with the same `episode` share it."""


@runtime_checkable
class WaitsForRoom(KeepsState, Protocol):
    """A tool whose state may wait for others to end before it opens, which is no fault of the model."""

    room_wait_s: float
    """Longest time that opening waits; then it raises ToolError."""


@runtime_checkable
class ExaminedTool(KeepsState, Protocol):
    """A tool whose state is examined when the model has answered, for rewards."""

    is_examined: bool
    """Whether the state is examined, also where the model never called the tool."""

    async def examined(self, state: EpisodeState) -> Mapping[str, JSON]:
        """Return fields of the answer's metadata. Raises ToolError for what is not the model's fault."""


@runtime_checkable
class EndsCalls(Protocol):
    """A tool that ends each call by itself. One that takes longer has waited for its turn."""

    wall_s: float
    """Longest time that the tool works on a call."""


def function_schema(tool: Tool) -> dict[str, JSON]:
    """Return a tool in the shape of OpenAI's functions, as chat templates take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`: its first half and its last, with a note between them. The
    note comes on top of `limit`."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = text[len(text) - (limit - head) :]
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{tail}"
