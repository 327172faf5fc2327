"""An environment some of whose rollouts fail as tools and networks do, to show that it biases nothing."""

import random
from collections.abc import Mapping

from pydantic import BaseModel, Field

from actors.environments.base import Environment, ScoresGroups
from actors.environments.build import build_environment
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.base import Closable, RewardError
from actors.settings.actors import EnvironmentConfig
from bus.errors import EngineError

FAILURES = (EpisodeError, RewardError, EngineError)
"""What a rollout fails with, each as often as the others."""


class FailingEnvironment:
    """Runs rollouts of another environment, and fails a fraction of them whatever the policy has done.

    Half of the failures come before the rollout, and half after it, when its reward is known and lost."""

    trajectories_per_episode = None

    class Settings(BaseModel):
        """Settings of `actors.environment.settings`."""

        environment: EnvironmentConfig = Field(discriminator="type")
        """Environment whose rollouts are run."""

        fraction: float = Field(0.1, ge=0, lt=1)
        """Fraction of the rollouts that fail."""

    def __init__(self, settings: Settings) -> None:
        self._inner: Environment = build_environment(settings.environment)
        self._fraction = settings.fraction
        self._random = random.Random()

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises one of `FAILURES` for a fraction of the rollouts."""
        fails = self._random.random() < self._fraction
        comes_first = self._random.random() < 0.5
        if fails and comes_first:
            self._fail()
        episode = await self._inner.run(task, policy)
        if fails:
            self._fail()
        return episode

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards."""
        return await self._inner.score_group(episodes) if isinstance(self._inner, ScoresGroups) else episodes

    async def close(self) -> None:
        """Close the environment whose rollouts are run."""
        if isinstance(self._inner, Closable):
            await self._inner.close()

    def _fail(self) -> None:
        raise self._random.choice(FAILURES)("an injected failure")
