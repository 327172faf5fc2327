"""What a rollout starts from, and the finished answer to it that a reward scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

from bus.errors import SchemaError
from bus.messages import Prompt
from bus.trajectory import FinishReason

JSON: TypeAlias = bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"] | None
ChatMessage: TypeAlias = Mapping[str, JSON]
"""One message of a chat as templates take it: at least `role` and `content`."""


class FixedMessages(tuple[ChatMessage, ...]):
    """Messages that nobody changes after they are given: the same object says the same in a later turn."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt to roll out."""

    task_id: str
    prompt: str | Sequence[JSON]
    """Text (one user message), or chat messages."""
    label: str | None = None
    """What the reward compares with."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    sample: int = 0
    """Which rollout of the prompt it is, from 0."""
    heldout: bool = False
    """Whether the task only measures: nothing is trained on it."""
    tools: Sequence[ChatMessage] = ()
    """Functions that the prompt offers to the policy, in the shape of OpenAI's `tools`."""

    @classmethod
    def of(cls, prompt: Prompt, task_id: str, *, sample: int = 0, heldout: bool = False) -> Self:
        """Return the task of a prompt as it was on the bus."""
        return cls(
            task_id=task_id,
            prompt=prompt.content,
            label=prompt.label,
            metadata=prompt.metadata,
            sample=sample,
            heldout=heldout,
            tools=tuple(tool for tool in prompt.tools if isinstance(tool, dict)),
        )

    def copied(self) -> Self:
        """Return the task with values of its own, for code that may change them: all rollouts of a prompt
        have the same ones."""
        prompt, metadata, tools = map(_copied, (self.prompt, self.metadata, self.tools))
        return replace(self, prompt=prompt, metadata=metadata, tools=tools)

    @property
    def messages(self) -> Sequence[ChatMessage]:
        """Return the prompt as a chat; raises SchemaError if it is none."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        messages = [message for message in self.prompt if isinstance(message, Mapping) and "role" in message]
        if not messages or len(messages) < len(self.prompt):
            raise SchemaError(
                f"task {self.task_id}: a prompt is text or messages with a role, not {self.prompt!r}"
            )
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer, ready to be scored."""

    task_id: str
    messages: Sequence[ChatMessage]
    """The prompt as a chat."""
    text: str
    """Text of the answer, without special tokens."""
    finish_reason: FinishReason
    label: str | None = None
    """Expected answer of the task."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """Further fields of the task."""
    token_count: int = 0
    """Number of sampled tokens, special ones included."""
    tools: Sequence[ChatMessage] = ()
    """Functions that the prompt offered to the policy, as those of a `Task`."""
    reward: float | None = None
    """Reward that the answer has alone, where a group reward gives the final one; else None."""

    def copied(self) -> Self:
        """Return the answer with values of its own, for code that may change them."""
        messages, metadata, tools = map(_copied, (self.messages, self.metadata, self.tools))
        return replace(self, messages=messages, metadata=metadata, tools=tools)


def _copied(value: Any) -> Any:
    """Return a copy of JSON down to its leaves."""
    if isinstance(value, Mapping):
        return {key: _copied(child) for key, child in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple) else value
