"""What environments of several agents that answer one task have in common."""

from collections.abc import Iterable

from actors.episodes.task import Task
from actors.policy.messages import Completion
from actors.rewards.base import RewardError, Scored
from actors.rewards.scoring.answer_scoring import answer_to
from actors.rewards.scoring.scorers import RewardChoice, Scorer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lettered(answers: Iterable[tuple[int, str]]) -> str:
    """Return numbered answers after the letters of their numbers, as `a 12 b 21`."""
    return " ".join(f"{LETTERS[number]} {answer}" for number, answer in answers)


def number_of_letter(text: str, count: int) -> int | None:
    """Return the number of the answer whose letter was written, of so many; None for any other text."""
    letter = text.strip()
    number = LETTERS.find(letter) if len(letter) == 1 else -1
    return number if 0 <= number < count else None


def names_of(role: str, count: int) -> list[str]:
    """Return the names of the agents of a role: each is compared with itself in other rollouts."""
    return [f"{role}-{n + 1}" for n in range(count)]


async def reward_now(scorer: Scorer | RewardChoice, task: Task, answer: Completion, where: str) -> float:
    """Return the reward of an agent's answer. Raises RewardError, also for one that comes later."""
    scored = await scorer.scored(
        answer_to(task, answer.content, answer.finish_reason, token_count=len(answer.token_ids))
    )
    if not isinstance(scored, Scored):
        raise RewardError(
            f"task {task.task_id}: its reward comes later, and {where} needs it now: have the reward wait"
        )
    return scored.reward
