"""Prompt, one completion, reward."""

from collections.abc import Mapping
from typing import Self

from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.scoring.answer_scoring import AnswerScoring, answer_to
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from actors.settings.actors import SingleTurnConfig


class SingleTurn:
    """Asks once and scores the answer; a group reward scores the answers of a group again."""

    def __init__(self, scorer: Scorer | RewardChoice, group_scorer: GroupScorer | None = None) -> None:
        self._scoring = AnswerScoring(scorer, group_scorer, takes_late_rewards=group_scorer is None)
        self.reward_times = self._scoring.times
        self.trajectories_per_episode: int | None = 1 if group_scorer is None else None
        """With a group reward, None: an answer has no reward before its siblings have ended, so that none is
        sent ahead."""

    @classmethod
    def from_config(cls, config: SingleTurnConfig) -> Self:
        """Build with the configured rewards; raises ConfigError for one that cannot be loaded."""
        return cls(RewardChoice.from_config(config), GroupScorer.from_config(config))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once; raises EngineError or RewardError for a rollout that failed."""
        policy = policy.fresh(task.task_id)
        completion = await policy.chat(task.messages, tools=task.tools or None)
        tokens = len(completion.token_ids)
        answer = answer_to(task, completion.text, completion.finish_reason, token_count=tokens)
        metrics = {
            "rollout/completion_tokens": float(tokens),
            "rollout/truncated": float(completion.finish_reason == "length"),
        }
        return await self._scoring.episode(policy, answer, metrics)

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return await self._scoring.score_group(episodes)

    async def close(self) -> None:
        await self._scoring.close()
