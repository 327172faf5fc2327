"""A request and its answer, as every dialect is translated to and from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from actors.episodes.task import ChatMessage
from actors.gateway.dialects.refusal import invalid
from actors.policy.messages import Tool, ToolCall

Finish = Literal["stop", "length", "tool_calls"]


class Origin(NamedTuple):
    """A tool as the client declared it, where that is more than a function's name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether the tool takes one text in place of JSON arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asks of the policy."""

    model: str
    """Name that the client gave; the answer repeats it."""
    messages: tuple[ChatMessage, ...]
    """The conversation, in the shape of OpenAI's chat completions."""
    tools: tuple[Tool, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Tools of namespaces and custom ones, by the name under which the policy calls them."""
    left_out: tuple[str, ...] = ()
    """Types of the tools that run at the provider, which the policy is not offered."""
    stream: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the client asked for of temperature, top_p, top_k and max_new_tokens."""
    stop: tuple[str, ...] = ()
    prefix: str = ""
    """How the answer is to begin, by the client's own words."""
    choices: int = 1
    tells_logprobs: bool = False
    must_call: tuple[str, ...] | None = None
    """Tools of which the answer is to call one, any where none is named; None where it may call none."""
    may_call: tuple[str, ...] | None = None
    """Tools that the answer may call, of those that are offered; None where it may call each."""
    one_call: bool = False
    """Whether the answer may have one call at most."""
    unmet: tuple[str, ...] = ()
    """Names of what it asked for and does not get."""
    unmeetable: tuple[str, ...] = ()
    """Names of what an answer without it would be of no use for, such as a schema, and does not get."""
    usage_in_stream: bool = False
    shows_reasoning: bool = True

    def __post_init__(self) -> None:
        """Raises `RefusedError` where nothing was said, such as by messages without parts."""
        if not self.messages:
            raise invalid("there is no message to answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the client is shown of a completion."""

    reply_id: str
    created_s: int
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    stop_text: str | None = None
    logprobs: tuple[tuple[str, float], ...] | None = None
    """Each sampled token with its nats, where nats were asked for."""
    further: tuple["Reply", ...] = ()
    unmet: tuple[str, ...] = ()
    """Names of what was asked for and is not given."""

    @property
    def all(self) -> tuple["Reply", ...]:
        return (self, *self.further)
