"""What environments of several agents that answer one task have in common."""

from actors.environments.answer_scoring import answer_to
from actors.environments.base import Task
from actors.policy.messages import Completion
from actors.rewards.base import RewardError, Scored
from actors.rewards.scoring import RewardChoice, Scorer


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
