"""Contract of reward functions: what they get, what they return and how they fail."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from actors.episodes.task import Answer
from bus.errors import SluiceError

__all__ = [
    "LATER", "Answer", "AnswerFaultError", "BudgetSpentError", "Closable", "GroupReward",
    "InvalidRewardError", "Late", "Later", "Result", "Reward", "RewardError", "Scored", "UnscoredError",
    "label_of", "without_working",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward and its parts, as a reward function may return them."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts by name, for the record; `reward_weights` makes another reward of them."""
    fault: str = ""
    """Says how the answer made the reward fail, which then is the lowest one; empty where it did not."""


class Later(Enum):
    """Result of a reward function whose reward is not known yet."""

    LATER = "later"


LATER = Later.LATER
"""The reward of this answer comes later, by `launch reward` or `storage.client.rewards.give_reward`."""
Late = Literal[Later.LATER]
Result = float | Mapping[str, float] | Scored | Late
"""What a reward returns: a finite number, its parts by name, both, or `LATER`."""
Reward = Callable[[Answer], Result | Awaitable[Result]]
"""Any function from an answer to a `Result`. A plain one runs in a thread, unless it is built in."""
GroupReward = Callable[[Sequence[Answer]], Sequence[Result] | Awaitable[Sequence[Result]]]
"""Any function from the answers of a group, with the rewards they have alone, to a `Result` for each."""


@runtime_checkable
class Closable(Protocol):
    """A reward or an environment, or a part of one, that holds connections or processes."""

    async def close(self) -> None:
        """Give up the connections or processes."""


class RewardError(SluiceError):
    """A reward function failed or returned no finite number: this rollout has no reward."""


class UnscoredError(RewardError):
    """An answer got no reward, which it may have caused itself: other answers show whether it did."""


class InvalidRewardError(UnscoredError):
    """A reward function returned what is no reward, as one that is wrong does each time."""


class AnswerFaultError(RewardError):
    """The answer itself made the reward fail, as no other answer would: it gets the lowest reward, not none.
    A reward of one's own raises it for what the policy wrote and the reward cannot read. Were such an answer
    left out, the policy could learn to write it in place of a wrong one."""

    def __init__(self, message: str, *, reward: float = 0.0) -> None:
        """Say what is wrong with the answer, and which reward it gets: the lowest that any answer may get."""
        super().__init__(message)
        self.reward = reward


class BudgetSpentError(RewardError):
    """A reward needs more calls or tokens of a server than the run allows: no later one can succeed."""


END_OF_WORKING = "####"
"""What precedes the number in the labels of GSM8K (arXiv:2110.14168), whose working stands before it."""


def without_working(label: str) -> str:
    """Return what follows the last `####` of a label; all of a label without one."""
    return label.rpartition(END_OF_WORKING)[2].strip()


def label_of(answer: Answer) -> str:
    """Return what to compare the answer with. Raises RewardError for a task without a label."""
    if answer.label is None:
        raise RewardError(
            f"task {answer.task_id} has no label to compare with: give it one, or another reward"
        )
    return answer.label
