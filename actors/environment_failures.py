"""Failures of each environment of an actor: their numbers, and when an environment cannot be right."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.environments.base import Environment, Episode, FailedEpisode, Task
from actors.environments.choice import DEFAULT, EnvironmentChoice, chosen_environment
from actors.rewards.base import BudgetSpentError, InvalidRewardError
from bus.codec import Json
from bus.errors import ConfigError
from bus.trajectory import TRUSTED_ENDS, End

MOST_INVALID_REWARDS = 200
"""Rewards in a row that are no numbers after which the reward is taken to be wrong, and the run ends."""
MOST_FAILURES_AT_FIRST = 200
"""Failures as `environment_error` before any success after which an environment is taken to be wrong."""
ALARM_AT_FIRST = 16
"""Failures of that kind from which screens show the latest."""
SHOWN_CHARACTERS = 150
"""What a screen shows of a long failure: so much of its beginning, and of its end, where tracebacks say what
was wrong."""
AT_FIRST_S = 300.0
"""Shortest time from the first of these failures to the end of the run: a service may be started late."""
UNKNOWN = "unknown"
"""Name under which prompts that choose none of the environments are counted."""


@dataclass
class _Failures:
    """Failures of one environment."""

    counts: Counter[str] = field(default_factory=Counter)
    invalid_rewards: int = 0
    """Rewards in a row that were none."""
    at_first: int = 0
    """Episodes that it failed itself before the first that it did not."""
    latest: str = ""
    """The latest of these."""
    since_s: float = 0.0
    """Time of the first of these."""
    has_worked: bool = False


class EnvironmentFailures:
    """Tells the environments of an actor apart, so that one that never works is not hidden by the others."""

    def __init__(self, environment: Environment) -> None:
        self._names = environment.names if isinstance(environment, EnvironmentChoice) else frozenset()
        self._of: dict[str, _Failures] = {}

    def failed(self, task: Task, error: BaseException, end: End) -> None:
        """Note that a rollout failed. What fails now and then, or after it has worked, ends no run.

        Raises `ConfigError` when rewards are never valid or cost more than the run allows, and when an
        environment has never worked; it names the environment where there are several.

        Args:
            task: what was rolled out.
            error: what the rollout raised.
            end: how its episode ended.
        """
        if isinstance(error, BudgetSpentError):
            raise ConfigError(str(error))
        name = self._name(task.metadata)
        of = self._of.setdefault(name, _Failures())
        if isinstance(error, InvalidRewardError):
            of.invalid_rewards += 1
            if of.invalid_rewards >= MOST_INVALID_REWARDS:
                raise ConfigError(
                    f"{self._said(name)}{of.invalid_rewards} rewards in a row were none, the last: {error}"
                )
        elif end == "environment_error" and not of.has_worked:
            of.since_s = of.since_s if of.at_first else time.monotonic()
            of.at_first += 1
            of.latest = f"{type(error).__name__}: {error}"
            if of.at_first >= MOST_FAILURES_AT_FIRST and time.monotonic() - of.since_s >= AT_FIRST_S:
                raise ConfigError(
                    f"{self._said(name)}each of the first {of.at_first} rollouts failed, the last: "
                    f"{of.latest}: correct the environment, or its prompts"
                )

    @property
    def alarm(self) -> str:
        """Return in words which environments have failed each rollout so far, and how; empty for none."""
        return "; ".join(
            f"{self._said(name)}each of the first {of.at_first} rollouts failed, the last: "
            f"{_in_short(of.latest)}"
            for name, of in self._of.items()
            if of.at_first >= ALARM_AT_FIRST and not of.has_worked
        )

    def worked(self, task: Task) -> None:
        """Note that a rollout ended as the policy made it end, before its siblings have."""
        of = self._of.setdefault(self._name(task.metadata), _Failures())
        of.has_worked, of.invalid_rewards = True, 0

    def count(self, metadata: Mapping[str, object], episodes: Mapping[int, Episode | FailedEpisode]) -> None:
        """Count the episodes of a group, by the metadata of its prompt."""
        name = self._name(metadata)
        of = self._of.setdefault(name, _Failures())
        failed = sum(episode.end not in TRUSTED_ENDS for episode in episodes.values())
        of.counts["episodes"] += len(episodes)
        of.counts["infra_failed_episodes"] += failed
        if failed < len(episodes):  # rewards that come late make the first success
            of.has_worked, of.invalid_rewards = True, 0

    @property
    def metrics(self) -> dict[str, Json]:
        """Return the numbers of each environment for the run's record, where there are several."""
        return {
            f"environment/{name or 'default'}/{what}": number
            for name, of in self._of.items()
            if self._names
            for what, number in of.counts.items()
        }

    def _name(self, metadata: Mapping[str, object]) -> str:
        chosen = chosen_environment(metadata) if self._names else DEFAULT
        return chosen if isinstance(chosen, str) and (chosen in self._names or not chosen) else UNKNOWN

    def _said(self, name: str) -> str:
        if not self._names:
            return ""
        return f"environment {name!r}: " if name else "the environment of prompts that choose none: "


def _in_short(failure: str) -> str:
    """Return a failure on one line, without the middle of a long one."""
    line = " ".join(failure.split())
    if len(line) <= 2 * SHOWN_CHARACTERS:
        return line
    return f"{line[:SHOWN_CHARACTERS]} ... {line[-SHOWN_CHARACTERS:]}"
