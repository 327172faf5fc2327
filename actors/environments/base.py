"""Contract of environments, with the data that they take and return."""

import asyncio
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from actors.episodes.agents import DEFAULT_AGENT
from actors.episodes.episode import AgentTrajectory, Episode, FailedEpisode, Fork
from actors.episodes.errors import EpisodeError
from actors.episodes.task import JSON, ChatMessage, Task
from actors.policy.policy import Policy
from actors.rewards.base import Closable
from actors.rewards.scoring.call_times import CallTimes
from bus.codec import Json

__all__ = [
    "DEFAULT_AGENT", "JSON", "AgentTrajectory", "CallsRewards", "ChatMessage", "Closable", "Environment",
    "Episode", "EpisodeError", "FailedEpisode", "Fork", "HandsBackAtStop", "RunsOnDemand", "ScoresGroups",
    "Task",
]  # fmt: skip


class Environment(Protocol):
    """Lets a policy act on a task. One instance serves many rollouts at once."""

    trajectories_per_episode: int | None
    """How many every episode has, if that is always the same; None where it depends on the episode. Knowing
    it, an actor can hand over finished rollouts of a group while others run."""

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once, recording on `policy.fresh(task.task_id)`: `policy` serves many rollouts.
        Raises SluiceError (EngineError, RewardError, ...) for a rollout that failed."""


@runtime_checkable
class ScoresGroups(Protocol):
    """An environment whose final rewards depend on all episodes of a group."""

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group, by sample, with their final rewards, or why they have none. It gets
        those that did not fail, once all of the group have ended. What it raises fails them all."""


@runtime_checkable
class RunsOnDemand(Protocol):
    """An environment whose rollouts are led from outside: leases are taken when somebody wants them."""

    @property
    def status(self) -> Mapping[str, Json]:
        """Return numbers for a screen."""

    async def open(self, stop: asyncio.Event) -> None:
        """Let others in. After `stop` what nobody has begun goes back by `HandBackError`."""

    async def leases_wanted(self, samples: int, timeout_s: float) -> int:
        """Return how many leases of so many rollouts are wanted, once some are or time is over."""


@runtime_checkable
class HandsBackAtStop(Protocol):
    """An environment whose rollouts may take longer than the end of a process: it does not finish them."""

    def stop_with(self, stop: asyncio.Event) -> None:
        """Begin no rollout after `stop`; those that go on a few seconds later raise `HandBackError`."""


@runtime_checkable
class CallsRewards(Protocol):
    """An environment that has rewards computed, and knows how long that takes."""

    @property
    def reward_times(self) -> tuple[CallTimes, ...]:
        """Return how long each reward takes."""
