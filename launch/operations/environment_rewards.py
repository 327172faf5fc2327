"""Which reward scores a stored group again: that of the environment that made it, or another one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.environments.choice import DEFAULT, chosen_environment
from actors.rewards.scoring.scorers import GroupScorer, RewardChoice, Scorer
from actors.settings.actors import ActorsConfig, EnvironmentConfig
from actors.settings.agents import POSTED
from actors.settings.rewards import RewardConfig
from bus.errors import ConfigError
from bus.messages import Prompt
from bus.trajectory import Trajectory

if TYPE_CHECKING:  # load torch
    from actors.policy.chat_format import ChatFormat
    from actors.rewards.scoring.rescoring import Rescored


class EnvironmentRewards:
    """Scores each group by the settings of its environment, which its prompt names if there are several."""

    def __init__(self, actors: ActorsConfig, reward: str | None) -> None:
        """Build the scorers of all environments.

        Raises `ConfigError` for a reward that cannot be loaded, and without `reward` where the run's only
        environment computes none.

        Args:
            actors: of the run.
            reward: scores all groups; None leaves each to its environment's own rewards, its group reward
                among them.
        """
        self._several = bool(actors.environments)
        self._environments = actors.by_name
        self._scorers = {name: _scorer(config, reward) for name, config in actors.by_name.items()}
        self._group_scorers = {
            name: None if reward is not None else _group_scorer(config)
            for name, config in actors.by_name.items()
        }
        if not any(self._scorers.values()):
            raise ConfigError("no environment of the run computes a reward: name one by --reward")

    async def rescore(
        self, group: Sequence[Trajectory], prompt: Prompt, chat: "ChatFormat", into: "Rescored"
    ) -> None:
        """Score a group's answers to `prompt`, adding to `into`.

        Among several environments, one whose answers cannot be scored again costs its own groups alone.
        Raises `ConfigError` as `actors.rewards.rescoring.rescore` does in all other cases."""
        from actors.rewards.scoring.rescoring import rescore

        name = str(chosen_environment(prompt.metadata)) if self._several else DEFAULT
        scorer = self._scorers.get(name)
        if scorer is None:
            into.failures += [
                f"{one.trajectory_id}: the environment {name!r} computes no reward: name one by --reward"
                for one in group
            ]
            return
        try:
            await rescore(group, prompt, chat, scorer, into, group_scorer=self._group_scorers[name])
        except ConfigError as error:
            if not self._several or self._environments[name].scores_one_answer:
                raise
            into.failures += [f"{one.trajectory_id}, environment {name!r}: {error}" for one in group]

    async def close(self) -> None:
        """Give up the connections and processes of the rewards."""
        for scorer in self._scorers.values():
            if scorer is not None:
                await scorer.close()


def _scorer(config: EnvironmentConfig, reward: str | None) -> Scorer | RewardChoice | None:
    """Return what scores answers of an environment; None where it computes no reward itself."""
    settings = config if isinstance(config, RewardConfig) else None
    if reward is not None:
        return Scorer.from_config(reward, settings or RewardConfig())
    return None if settings is None or settings.reward == POSTED else RewardChoice.from_config(settings)


def _group_scorer(config: EnvironmentConfig) -> GroupScorer | None:
    return GroupScorer.from_config(config) if isinstance(config, RewardConfig) else None
