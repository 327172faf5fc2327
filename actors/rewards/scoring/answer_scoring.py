"""Makes an episode of what was recorded and of the reward of its answer, by itself or within its group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import FAULT_FRACTION, LONGEST_FAULT, REWARD_FAULT
from actors.episodes.task import Answer, Task
from actors.policy.policy import Policy
from actors.rewards.base import RewardError, Scored
from actors.rewards.scoring.call_times import CallTimes
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from actors.settings.rewards import RewardConfig
from bus.codec import Json
from bus.trajectory import End, FinishReason

NOTHING: Mapping[str, Json] = MappingProxyType({})


def answer_to(task: Task, text: str, finish_reason: FinishReason, *, token_count: int) -> Answer:
    """Return what a reward sees of an episode: the task, the text that answers it, and how that ended.
    `token_count` counts all tokens that the policy sampled, also those of earlier turns."""
    return Answer(
        task_id=task.task_id,
        messages=task.messages,
        text=text,
        finish_reason=finish_reason,
        label=task.label,
        metadata=task.metadata,
        token_count=token_count,
        tools=task.tools,
    )


@dataclass(frozen=True, slots=True)
class AnswerScoring:
    """Scores the answers of an environment; a group reward scores those of a group again."""

    scorer: Scorer | RewardChoice
    group_scorer: GroupScorer | None = None
    takes_late_rewards: bool = False
    """Whether a reward may come later: storage then finds its trajectory by the number of the episode, which
    is that of the trajectory only where each episode has one."""

    @classmethod
    def from_config(cls, config: RewardConfig) -> Self:
        """Build with the configured rewards; raises ConfigError for one that cannot be loaded."""
        return cls(RewardChoice.from_config(config), GroupScorer.from_config(config))

    @property
    def times(self) -> tuple[CallTimes, ...]:
        return (*self.scorer.times, *(self.group_scorer.times if self.group_scorer else ()))

    async def episode(
        self, policy: Policy, answer: Answer, metrics: Mapping[str, float], *,
        end: End | None = None, metadata: Mapping[str, Json] = NOTHING,
    ) -> Episode:  # fmt: skip
        """Return what `policy` recorded with the reward of `answer`; raises RewardError.

        Args:
            policy: of the rollout.
            answer: what is scored.
            metrics: numbers of the episode, to which its reward is added.
            end: why the episode has no more turns; by default each trajectory's last turn says it.
            metadata: what is kept with each trajectory besides."""
        found = await self.scorer.scored(answer)
        late = not isinstance(found, Scored)
        if late:
            self._refuse_unless_late_is_possible(answer)
        scored = found if isinstance(found, Scored) else Scored(0.0)
        if scored.fault:
            metadata = {**metadata, REWARD_FAULT: scored.fault[:LONGEST_FAULT]}
        recorded = policy.trajectories(scored.reward, end=end, reward_components=scored.components)
        if late or metadata:
            recorded = tuple(
                replace(part, reward_due=late, metadata={**part.metadata, **metadata}) for part in recorded
            )
        return Episode(
            trajectories=recorded,
            metrics={
                **({} if late else {"rollout/reward": scored.reward}),
                FAULT_FRACTION: float(bool(scored.fault)),
                **metrics,
            },
            answer=replace(answer, reward=scored.reward) if self.group_scorer else None,
        )

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        answers = {n: episode.answer for n, episode in episodes.items() if episode.answer is not None}
        if self.group_scorer is None or not answers:
            return episodes
        found = await self.group_scorer.scored(list(answers.values()))
        scored = dict(zip(answers, found, strict=True))
        return {
            n: _rewarded(episode, scored[n]) if n in scored else episode for n, episode in episodes.items()
        }

    async def close(self) -> None:
        await self.scorer.close()

    def _refuse_unless_late_is_possible(self, answer: Answer) -> None:
        if self.group_scorer is not None:
            raise RewardError(
                f"task {answer.task_id}: its reward comes later, and a group reward needs it now"
            )
        if not self.takes_late_rewards:
            raise RewardError(
                f"task {answer.task_id}: its reward comes later, which needs an environment with one "
                "trajectory an episode: have the reward wait for its score, or set type=single_turn"
            )


def _rewarded(episode: Episode, scored: Scored) -> Episode:
    """Return the episode with another reward. Parts that only the first reward has stay on the record."""
    fault: Mapping[str, Json] = {REWARD_FAULT: scored.fault[:LONGEST_FAULT]} if scored.fault else {}
    return replace(
        episode,
        trajectories=tuple(
            replace(
                part,
                reward=scored.reward,
                reward_components={**part.reward_components, **scored.components},
                metadata={**part.metadata, **fault},
            )
            for part in episode.trajectories
        ),
        metrics={
            **episode.metrics,
            "rollout/reward": scored.reward,
            **({FAULT_FRACTION: 1.0} if scored.fault else {}),
        },
    )
