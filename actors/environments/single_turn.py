"""Prompt, one completion, reward."""

from dataclasses import replace
from typing import Self

from actors.config import SingleTurnConfig
from actors.environments.base import Episode, Task
from actors.policy.policy import Policy
from actors.rewards.base import LATER, Answer
from actors.rewards.scoring import Scorer


class SingleTurn:
    """Asks once and scores the answer."""

    trajectories_per_episode: int | None = 1

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    @classmethod
    def from_config(cls, config: SingleTurnConfig) -> Self:
        """Build with the configured reward; raises ConfigError for one that cannot be loaded."""
        scorer = Scorer(config.reward, timeout_s=config.reward_timeout_s, threads=config.reward_threads)
        return cls(scorer)

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once; raises EngineError or RewardError for a rollout that failed."""
        policy = policy.fresh(task.task_id)
        completion = await policy.chat(task.messages)
        scored = await self._scorer.score(
            Answer(
                task_id=task.task_id,
                messages=task.messages,
                text=completion.text,
                finish_reason=completion.finish_reason,
                label=task.label,
                metadata=task.metadata,
                token_count=len(completion.token_ids),
            )
        )
        late = scored is LATER
        reward = 0.0 if scored is LATER else scored
        return Episode(
            trajectories=tuple(replace(t, reward_due=late) for t in policy.trajectories(reward)),
            metrics={
                **({} if late else {"rollout/reward": reward}),
                "rollout/completion_tokens": float(len(completion.token_ids)),
                "rollout/truncated": float(completion.finish_reason == "length"),
            },
        )
