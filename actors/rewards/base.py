"""What a reward function is given and how it fails."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from actors.environments.base import JSON, ChatMessage
from bus.errors import SluiceError
from bus.trajectory import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer, ready to be scored."""

    task_id: str
    messages: Sequence[ChatMessage]
    """The prompt as a chat."""
    text: str
    """What the policy said, without special tokens."""
    finish_reason: FinishReason
    label: str | None = None
    """The task's expected answer."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """The task's own fields."""
    token_count: int = 0
    """Tokens sampled, special ones included."""


class Later(Enum):
    """What a reward returns that is not known yet."""

    LATER = "later"


LATER = Later.LATER
"""The reward of this answer comes later, by `launch reward` or `storage.rewards.give_reward`."""
Late = Literal[Later.LATER]

Reward = Callable[[Answer], float | Late | Awaitable[float | Late]]
"""Any function from an answer to a finite number or `LATER`. A plain one runs in a thread, unless it is built
in."""


class RewardError(SluiceError):
    """A reward function failed or returned no finite number: this rollout has no reward."""
