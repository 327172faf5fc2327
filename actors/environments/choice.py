"""Several environments in one run: each prompt is rolled out in the one that it names."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from actors.environments.base import CallsRewards, Environment, ScoresGroups
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.scoring.call_times import CallTimes
from bus.errors import nearest

CHOICE = "environment"
"""Field of a prompt's metadata that names its environment."""
DEFAULT = ""
"""Name of the environment of prompts that name none."""


class EnvironmentChoice:
    """Rolls each task out in the environment that its prompt names, or else in the run's own."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        """Choose among `environments`, of which that named `DEFAULT` is for prompts that name none."""
        self._environments = environments
        each = {environment.trajectories_per_episode for environment in environments.values()}
        self.trajectories_per_episode: int | None = each.pop() if len(each) == 1 else None

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the environments, that for prompts that name none among them."""
        return frozenset(self._environments)

    @property
    def reward_times(self) -> tuple[CallTimes, ...]:
        each = self._environments.values()
        return tuple(times for one in each if isinstance(one, CallsRewards) for times in one.reward_times)

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises EpisodeError for a name of no environment, and what that raises."""
        chosen = chosen_environment(task.metadata)
        if problem := refused_environment(chosen, self._environments):
            raise EpisodeError(f"task {task.task_id}: {problem}")
        episode = await self._environments[str(chosen)].run(task, policy)
        return replace(episode, environment=str(chosen))

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; all were in the same environment."""
        first = next(iter(episodes.values()))
        environment = self._environments[first.environment]
        return await environment.score_group(episodes) if isinstance(environment, ScoresGroups) else episodes


def chosen_environment(metadata: Mapping[str, object]) -> object:
    """Return what a prompt's metadata names as its environment; `DEFAULT` where it is null or nothing."""
    chosen = metadata.get(CHOICE)
    return DEFAULT if chosen is None else chosen


def refused_environment(chosen: object, known: Collection[str]) -> str | None:
    """Return why a prompt cannot be rolled out there, and the remedy; None if it can."""
    if isinstance(chosen, str) and chosen in known:
        return None
    names = sorted(set(known) - {DEFAULT})
    return (
        f"its environment is {chosen!r}: {nearest(chosen, names)}the run has "
        f"{', '.join(names) or 'none by name'}; define it in actors.environments, or name the field "
        f"{CHOICE!r} of its metadata otherwise"
    )
