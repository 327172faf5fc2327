"""What the policy answers, as an environment reads it: text, reasoning and tool calls."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from actors.episodes.task import JSON, ChatMessage
from bus.errors import RequestRefusedError, SluiceError
from bus.trajectory import FinishReason

Tool: TypeAlias = Mapping[str, JSON]
"""A function that the policy may call, in the shape of OpenAI's `tools`."""


def tool_name(tool: Tool) -> str:
    """Return the name of a tool. Raises `MessagesError` for what is none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise MessagesError(f'{tool!r} is no tool: write {{"type": "function", "function": {{"name": ...}}}}')
    return name


class MessagesError(SluiceError, ValueError):
    """These messages or tools cannot be rendered for the policy: whoever made them must change them."""


UNANSWERABLE = RequestRefusedError, MessagesError
"""What a chat raises that nobody can answer: it is too long, or the chat template refuses it. Where an
earlier turn was answered, what was written since made it so: the episode is scored without another turn."""


class ToolCallError(SluiceError, ValueError):
    """The policy wrote a tool call that cannot be carried out; the message is fit to be shown to it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as the policy wrote it."""

    id: str
    """Name of the call, which the tool's answer repeats as `tool_call_id`."""
    name: str
    """Name of the tool, which may not exist: the policy wrote it."""
    arguments: str
    """JSON text of the arguments. It may be no JSON: see `parsed`."""

    def parsed(self) -> Mapping[str, JSON]:
        """Return the arguments. Raises `ToolCallError`, which says what is wrong with them."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"the arguments of {self.name} are no JSON: {error}") from error
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            raise ToolCallError(f"the arguments of {self.name} are no JSON object, but {kind}")
        return arguments

    @property
    def as_json(self) -> Mapping[str, JSON]:
        """Return the call in the shape of OpenAI's messages."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The policy's answer to one call."""

    text: str
    """The answer, without special tokens: reasoning, content and tool calls as they were written."""
    token_ids: np.ndarray
    """int32 [N], as sampled."""
    finish_reason: FinishReason
    number: int
    """Counts the completions of the rollout from 0."""
    content: str = ""
    """The text without reasoning and tool calls."""
    reasoning: str | None = None
    """What the policy thought before it answered; None where it did not."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """What looked like a tool call and is none, as text."""
    prompt_tokens: int = 0
    """Number of tokens that the completion continues."""
    stop_text: str | None = None
    """The text that ended it, which is in `text` and not in `content`; None where something else did."""
    logprobs: np.ndarray | None = None
    """float32 [N], nats of the tokens as they were sampled."""

    @property
    def message(self) -> ChatMessage:
        """Return the answer as a message, to be appended to those it answers. Malformed calls are part of its
        content, so that nothing of the answer is lost."""
        message: dict[str, JSON] = {
            "role": "assistant",
            "content": "\n".join(part for part in (self.content, *self.malformed_calls) if part),
        }
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_json for call in self.tool_calls]
        return message
