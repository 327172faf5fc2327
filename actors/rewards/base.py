"""Contract of reward functions: what they get, what they return and how they fail."""

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
    """Text of the answer, without special tokens."""
    finish_reason: FinishReason
    label: str | None = None
    """Expected answer of the task."""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    """Further fields of the task."""
    token_count: int = 0
    """Number of sampled tokens, special ones included."""


class Later(Enum):
    """Result of a reward function whose reward is not known yet."""

    LATER = "later"


LATER = Later.LATER
"""The reward of this answer comes later, by `launch reward` or `storage.client.rewards.give_reward`."""
Late = Literal[Later.LATER]

Reward = Callable[[Answer], float | Late | Awaitable[float | Late]]
"""Any function from an answer to a finite number or `LATER`. A plain one runs in a thread, unless it is built
in."""


class RewardError(SluiceError):
    """A reward function failed or returned no finite number: this rollout has no reward."""


class InvalidRewardError(RewardError):
    """A reward function returned what is no reward, as one that is wrong does each time."""
