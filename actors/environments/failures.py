"""Failures of each environment of an actor: their numbers, and when an environment or reward is broken."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from actors.environments.base import Environment
from actors.environments.choice import DEFAULT, EnvironmentChoice, chosen_environment
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import ToolError
from actors.episodes.task import Task
from actors.rewards.base import BudgetSpentError, InvalidRewardError, RewardError
from actors.settings.groups import FailureLimitsConfig
from bus.actor_counters import FAILED_EPISODES, failed_by
from bus.codec import Json
from bus.errors import ConfigError, EngineError, in_short, with_traceback
from bus.trajectory import End

MOST_INVALID_REWARDS = 200
"""Rewards in a row that are no numbers after which the reward is taken to be wrong, and the run ends."""
UNKNOWN = "unknown"
"""Name under which prompts that choose none of the environments are counted."""
WORKED = ""
"""What is noted of a rollout that did not fail."""


@dataclass
class _Failures:
    recent: deque[str]
    """What failed each of the latest rollouts, `reward` or `environment`; `WORKED` for one that did not."""
    faults: deque[str]
    """How the policy kept each of the latest episodes from being scored; empty where it is scored."""
    counts: Counter[str] = field(default_factory=Counter)
    invalid_rewards: int = 0
    """Rewards in a row that were none."""
    latest: dict[str, str] = field(default_factory=dict)
    since_s: float | None = None
    """Time since when too many fail; None while they do not."""

    @property
    def failed(self) -> Counter[str]:
        return Counter(what for what in self.recent if what != WORKED)


class EnvironmentFailures:
    """Tells the environments of an actor apart, so that one that never works is not hidden by the others."""

    def __init__(
        self, environment: Environment, limits: FailureLimitsConfig | None = None, *,
        serves: Callable[[], bool] = lambda: True, of: str = "",
    ) -> None:  # fmt: skip
        """Take the environment of an actor, and when its failures end the run. `serves` tells whether an
        engine serves: a rollout that takes too long may wait for one else. `of` says in words whose rollouts
        they are, where they are not those that are trained on."""
        self._serves = serves
        self._of_whom = f"{of}: " if of else ""
        self._names = environment.names if isinstance(environment, EnvironmentChoice) else frozenset()
        self._limits = limits or FailureLimitsConfig()
        self._of: dict[str, _Failures] = {}

    def failed(self, task: Task, error: BaseException, end: End, *, worked_before: int = 0) -> None:
        """Note that a rollout failed, or that a group did whose rollouts had worked. What an engine broke is
        not noted, and what took too long only while an engine serves.

        Raises `ConfigError`, with the traceback of what failed, when rewards are never valid or cost more
        than the run allows, and when too many rollouts have failed for too long. It names the environment
        where there are several.

        Args:
            task: what was rolled out.
            error: what the rollout raised.
            end: how its episode ended.
            worked_before: number of rollouts that it fails, of those that were noted as working; 0 for one
                that was not noted.
        """
        if isinstance(error, BudgetSpentError):
            raise ConfigError(str(error))
        name = self._name(task.metadata)
        of = self._failures(name)
        if isinstance(error, InvalidRewardError):
            of.invalid_rewards += 1
            if of.invalid_rewards >= MOST_INVALID_REWARDS:
                raise ConfigError(
                    f"{self._said(name)}{of.invalid_rewards} rewards in a row were none, the last: {error}"
                )
        what = failed_by(end)
        if what == "infrastructure" and not (end == "timeout" and self._serves()):
            return
        what = "environment" if what == "infrastructure" else what
        for _ in range(worked_before):
            if WORKED in of.recent:
                of.recent.remove(WORKED)
        of.recent.extend([what] * max(1, worked_before))
        of.latest[what] = with_traceback(f"{type(error).__name__}: {error}", error)
        self._judge(of)
        if (
            self._may_be_judged(of)
            and of.since_s is not None
            and time.monotonic() - of.since_s >= self._limits.after_s
        ):
            raise ConfigError(
                f"{self._said(name)}{_counted(of)}: correct what failed, or its prompts, or allow more in "
                f"actors.failures. The last: {_latest(of)}"
            )

    @property
    def alarm(self) -> str:
        """Return in words which environments fail too many of their rollouts, and how; empty for none."""
        return "; ".join(
            f"{self._said(name)}{_counted(of)}, the last: {in_short(_latest(of))}"
            for name, of in self._of.items()
            if of.since_s is not None and of.failed
        ) or "; ".join(
            f"{self._said(name)}{_faulty(of)}" for name, of in self._of.items() if self._is_faulty(of)
        )

    def _is_faulty(self, of: _Failures) -> bool:
        """Return whether too many of the latest episodes could not be scored: it ends no run, as a policy may
        learn better, but a reward or program that is broken may look so."""
        limit, count = self._limits.fraction, len(of.faults)
        few = count < min(self._limits.at_least, self._limits.rollouts)
        return limit is not None and not few and sum(map(bool, of.faults)) >= limit * count

    def forget_judged(self) -> None:
        """Judge the next rollouts by themselves, since those before were of an earlier evaluation. For how
        long too many fail is not forgotten, nor are rollouts that are too few to be judged."""
        for of in self._of.values():
            if self._may_be_judged(of):
                of.recent.clear()

    def worked(self, task: Task, fault: str = "") -> None:
        """Note that a rollout ended as the policy made it end, before its siblings have; `fault` says how the
        policy kept it from being scored, if it did."""
        of = self._failures(self._name(task.metadata))
        of.invalid_rewards = 0
        of.recent.append(WORKED)
        of.faults.append(fault)
        self._judge(of)

    def count(self, metadata: Mapping[str, object], episodes: Mapping[int, Episode | FailedEpisode]) -> None:
        of = self._failures(self._name(metadata))
        broken = Counter(filter(None, (failed_by(episode.end) for episode in episodes.values())))
        of.counts["episodes"] += len(episodes)
        for kind, metric in FAILED_EPISODES.items():
            of.counts[metric] += broken[kind]
        if broken.total() < len(episodes):  # rewards that come late make the first success
            of.invalid_rewards = 0

    @property
    def metrics(self) -> dict[str, Json]:
        """Return the numbers of each environment for the run's record, where there are several."""
        return {
            f"environment/{name or 'default'}/{what}": number
            for name, of in self._of.items()
            if self._names
            for what, number in of.counts.items()
        }

    def _judge(self, of: _Failures) -> None:
        """Note since when too many of the latest rollouts fail."""
        limit, failed = self._limits.fraction, len(of.recent) - of.recent.count(WORKED)
        if not self._may_be_judged(of):
            return
        if limit is None or failed < limit * len(of.recent):
            of.since_s = None
        elif of.since_s is None:
            of.since_s = time.monotonic()

    def _may_be_judged(self, of: _Failures) -> bool:
        return len(of.recent) >= min(self._limits.at_least, self._limits.rollouts)

    def _failures(self, name: str) -> _Failures:
        return self._of.setdefault(
            name, _Failures(deque(maxlen=self._limits.rollouts), deque(maxlen=self._limits.rollouts))
        )

    def _name(self, metadata: Mapping[str, object]) -> str:
        chosen = chosen_environment(metadata) if self._names else DEFAULT
        return chosen if isinstance(chosen, str) and (chosen in self._names or not chosen) else UNKNOWN

    def _said(self, name: str) -> str:
        if not self._names:
            return self._of_whom
        chosen = f"environment {name!r}: " if name else "the environment of prompts that choose none: "
        return f"{self._of_whom}{chosen}"


def _counted(of: _Failures) -> str:
    what = " and ".join(
        f"{number} failed by {'their reward' if kind == 'reward' else 'their environment'}"
        for kind, number in of.failed.most_common()
    )
    return f"of the latest {len(of.recent)} rollouts, {what}"


def _faulty(of: _Failures) -> str:
    """Return how many of the latest episodes could not be scored, and why the last could not."""
    faults = [fault for fault in of.faults if fault]
    return (
        f"of the latest {len(of.faults)} episodes, {len(faults)} have the lowest reward, since what the "
        f"policy wrote made the reward, environment or program fail, the last: {in_short(faults[-1])}"
    )


def _latest(of: _Failures) -> str:
    [(kind, _)] = of.failed.most_common(1)
    return of.latest[kind]


def end_after(error: BaseException) -> End:
    """Return how the trajectories of an episode end that raised `error`, or something because of it."""
    if isinstance(error, RewardError):
        return "reward_error"
    if isinstance(error, EngineError):
        return "engine_error"
    if isinstance(error, ToolError):
        return "tool_error"
    if isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError):
        return "timeout"
    return "environment_error"
