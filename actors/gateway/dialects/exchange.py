"""A request and its answer, as every dialect is translated to and from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from actors.episodes.task import ChatMessage
from actors.policy.messages import Tool, ToolCall

Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asks of the policy."""

    model: str
    """Name that the client gave; the answer repeats it."""
    messages: tuple[ChatMessage, ...]
    """The conversation, in the shape of OpenAI's chat completions."""
    tools: tuple[Tool, ...] = ()
    stream: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What it asked for of temperature, top_p, top_k and max_new_tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    unmet: tuple[str, ...] = ()
    """Names of what it asked for and does not get."""
    usage_in_stream: bool = False
    shows_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the client is shown of a completion."""

    reply_id: str
    created_s: int
    """Unix time."""
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
