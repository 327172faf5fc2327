"""Prompt, one completion, reward."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from actors.config import SingleTurnConfig
from actors.environments.base import Episode, FailedEpisode, Task
from actors.policy.policy import Policy
from actors.rewards.base import Answer, RewardError, Scored
from actors.rewards.scoring import GroupScorer, RewardChoice, Scorer


class SingleTurn:
    """Asks once and scores the answer; a group reward scores the answers of a group again."""

    def __init__(self, scorer: Scorer | RewardChoice, group_scorer: GroupScorer | None = None) -> None:
        self._scorer = scorer
        self._group_scorer = group_scorer
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
        completion = await policy.chat(task.messages)
        answer = Answer(
            task_id=task.task_id,
            messages=task.messages,
            text=completion.text,
            finish_reason=completion.finish_reason,
            label=task.label,
            metadata=task.metadata,
            token_count=len(completion.token_ids),
        )
        found = await self._scorer.scored(answer)
        late = not isinstance(found, Scored)
        if late and self._group_scorer is not None:
            raise RewardError(f"task {task.task_id}: its reward comes later, and a group reward needs it now")
        scored = found if isinstance(found, Scored) else Scored(0.0)
        recorded = policy.trajectories(scored.reward, reward_components=scored.components)
        return Episode(
            trajectories=tuple(replace(part, reward_due=late) for part in recorded),
            metrics={
                **({} if late else {"rollout/reward": scored.reward}),
                "rollout/completion_tokens": float(len(completion.token_ids)),
                "rollout/truncated": float(completion.finish_reason == "length"),
            },
            answer=replace(answer, reward=scored.reward) if self._group_scorer else None,
        )

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        answers = {n: episode.answer for n, episode in episodes.items() if episode.answer is not None}
        if self._group_scorer is None or not answers:
            return episodes
        found = await self._group_scorer.scored(list(answers.values()))
        scored = dict(zip(answers, found, strict=True))
        return {
            n: _rewarded(episode, scored[n]) if n in scored else episode for n, episode in episodes.items()
        }

    async def close(self) -> None:
        """Give up the rewards' connections and processes."""
        await self._scorer.close()


def _rewarded(episode: Episode, scored: Scored) -> Episode:
    """Return the episode with another reward. Parts that only the first reward has stay on the record."""
    return replace(
        episode,
        trajectories=tuple(
            replace(
                part, reward=scored.reward, reward_components={**part.reward_components, **scored.components}
            )
            for part in episode.trajectories
        ),
        metrics={**episode.metrics, "rollout/reward": scored.reward},
    )
