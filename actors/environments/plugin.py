"""Environments of the user's own: built with checked settings, and kept from ending the actor."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from math import inf
from typing import TypeVar, cast

import structlog

from actors.environments.base import Environment, HandsBackAtStop, ScoresGroups
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import (
    FAULT_FRACTION,
    LONGEST_FAULT,
    REWARD_FAULT,
    EpisodeError,
    LatestUses,
    is_of_host,
)
from actors.episodes.task import Task
from actors.policy.messages import UNANSWERABLE
from actors.policy.policy import Policy
from actors.rewards.base import Closable
from actors.settings.actors import PluginEnvironmentConfig
from bus.errors import ConfigError, EngineLostError, HandBackError, SluiceError, leaves
from bus.process.plugins import RAISED, built_part

log = structlog.get_logger()
T = TypeVar("T")
CLOSE_S = 30.0
"""Longest time that an environment may take to give up what it holds."""
NOT_THE_EPISODES = EngineLostError, HandBackError
"""Errors that say nothing about the episode: its lease is for another actor."""


class PluginFaultError(EpisodeError):
    """An environment of the user's raised, or returned no episode, which what the policy wrote may cause."""


class PluginEnvironment:
    """Runs an environment of the user's, whose exceptions fail the rollout and not the actor."""

    def __init__(
        self, name: str, environment: Environment, *, timeout_s: float = inf, lowest: float | None = None
    ) -> None:
        self.trajectories_per_episode = environment.trajectories_per_episode
        self._lowest = lowest
        """Reward of an episode that the policy made fail; None where it has none."""
        self._latest = LatestUses()
        """Rollouts that gave an episode."""
        self._name = name
        self._timeout_s = timeout_s
        self._environment = environment

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Whatever the user's code raises by itself is an `EpisodeError`. Where the
        policy was asked, and the environment works for others, what it wrote is to blame: the episode has the
        lowest reward. What says that a server is away, or the host has nothing left, is not blamed on it."""
        try:
            episode = await self._rolled_out(task, policy)
        except (PluginFaultError, *UNANSWERABLE) as error:
            self._latest.note(worked=False)
            unscored = self._unscored(policy, error) if self._latest.work else None
            if unscored is None:
                raise
            return unscored
        self._latest.note(worked=True, reward=min(part.reward for part in episode.trajectories))
        if not isinstance(episode.metrics, Mapping):
            return episode
        return replace(episode, metrics={FAULT_FRACTION: 0.0, **episode.metrics})

    def _unscored(self, policy: Policy, error: Exception) -> Episode | None:
        """Return what was recorded, with the lowest reward; None where that is no episode."""
        lowest = self._latest.lowest(self._lowest)
        if lowest is None:
            return None
        parts = (policy.begun or policy).trajectories(lowest)
        if not parts or self.trajectories_per_episode not in (None, len(parts)):
            return None
        fault = {REWARD_FAULT: str(error)[:LONGEST_FAULT]}
        noted = (replace(part, metadata={**part.metadata, **fault}) for part in parts)
        return Episode(tuple(noted), {FAULT_FRACTION: 1.0})

    async def _rolled_out(self, task: Task, policy: Policy) -> Episode:
        try:
            episode = await self._in_time(
                self._environment.run(task.copied(), policy), f"a rollout of {task.task_id}"
            )
        except SluiceError:
            raise
        except ExceptionGroup as errors:  # of a TaskGroup, as environments of several agents have
            if ours := errors.subgroup(NOT_THE_EPISODES):
                raise next(leaves(ours)) from errors
            raise self._failed(task, errors) from errors
        except RAISED as error:
            raise self._failed(task, error) from error
        if not _is_episode(episode):
            raise PluginFaultError(
                f"environment {self._name} returned {episode!r} for {task.task_id}: return an Episode with "
                "policy.trajectories(reward)"
            )
        return episode

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes with their final rewards; as they are where the environment leaves it at that.
        Raises `EpisodeError` for whatever the user's code raises by itself."""
        if not isinstance(self._environment, ScoresGroups):
            return episodes
        try:
            scored = await self._in_time(self._environment.score_group(episodes), "a group's rewards")
        except SluiceError:
            raise
        except RAISED as error:
            raise EpisodeError(f"environment {self._name} raised {error!r} on a group's rewards") from error
        if not isinstance(scored, Mapping) or scored.keys() != episodes.keys():
            raise EpisodeError(
                f"environment {self._name}: score_group returned {scored!r}: return an episode for each of "
                f"the samples {sorted(episodes)}"
            )
        for sample, outcome in scored.items():
            if not isinstance(outcome, FailedEpisode) and not _is_episode(outcome):
                raise EpisodeError(
                    f"environment {self._name}: score_group returned {outcome!r} for sample {sample}: "
                    "return an Episode with trajectories, or a FailedEpisode"
                )
        return scored

    def stop_with(self, stop: asyncio.Event) -> None:
        """Tell the environment when this process is to end, if it wants to know. Raises `ConfigError` for
        whatever the user's code raises."""
        if not isinstance(self._environment, HandsBackAtStop):
            return
        try:
            self._environment.stop_with(stop)
        except SluiceError:
            raise
        except RAISED as error:
            raise ConfigError(f"environment {self._name}: stop_with raised {error!r}") from error

    async def close(self) -> None:
        """Have the environment give up what it holds, if it knows how and does it soon."""
        if not isinstance(self._environment, Closable):
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._environment.close()
        except TimeoutError:
            log.warning("environment_not_closed", environment=self._name, waited_s=CLOSE_S)

    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        """Return the result of the user's method. Raises `EpisodeError` once it takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():  # the user's own
                raise
            raise EpisodeError(
                f"environment {self._name}: {what} took longer than rollout_timeout_s={self._timeout_s:g}"
            ) from error

    def _failed(self, task: Task, error: BaseException) -> EpisodeError:
        kind = EpisodeError if is_of_host(error) else PluginFaultError
        return kind(f"environment {self._name} raised {error!r} on task {task.task_id}")


def plugin_environment(config: PluginEnvironmentConfig) -> PluginEnvironment:
    """Build the environment that `config` names, with its settings. Raises `ConfigError` when it cannot be
    imported, its settings are wrong, or it is no environment."""
    name, parts = config.environment, ("run", "trajectories_per_episode")
    built = cast(
        Environment, built_part("environment", name, config.settings, parts, at="actors.environment.settings")
    )
    if isinstance(built, ScoresGroups) and built.trajectories_per_episode is not None:
        raise ConfigError(
            f"environment {name!r} has score_group, and its episodes would be sent before their group is "
            "scored: set trajectories_per_episode = None"
        )
    return PluginEnvironment(name, built, timeout_s=config.rollout_timeout_s, lowest=config.lowest)


def _is_episode(outcome: object) -> bool:
    return isinstance(outcome, Episode) and bool(outcome.trajectories)
