"""What of a run wants attention, in words: figures out of their ranges, collapses, failures, a full disk."""

import shutil
from collections import deque
from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path

import structlog

from bus.actor_counters import failed_fraction
from bus.errors import ConfigError
from launch.run_view.run_files import recorded_config
from launch.run_view.run_status import RunState
from launch.run_view.status_texts import ends_text
from launch.run_view.units import size
from launch.run_view.waiting_reasons import waits_for_leases
from launch.settings.run_config import RunConfig
from learner.config.process_settings import used_diagnostics
from learner.metrics.alarms import LearningAlarm
from learner.metrics.range_warnings import ranges
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, integer, number

log = structlog.get_logger()
SMOOTHED = 10
"""Steps whose mean reward is compared."""
LEAST_FALL = 0.5
"""Part of the whole rise of the reward that it has lost when it counts as collapsed."""
LEAST_ENTROPY = 0.05
"""Part of the entropy of the first steps below which it counts as collapsed."""
MOST_FAILED = 0.1
"""Part of the recent episodes that may fail for reasons outside the policy."""
LEAST_FREE = 0.05
"""Part of a disk that should be free."""


class Trend:
    """How a quantity went over the steps: the first, the highest and the latest mean of `SMOOTHED` steps."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.highest = -inf
        self.at = 0
        """Last step of the highest mean."""
        self._latest: deque[float] = deque(maxlen=SMOOTHED)

    @property
    def latest(self) -> float | None:
        """Return the mean of the latest steps; None before there are enough."""
        return sum(self._latest) / SMOOTHED if len(self._latest) == SMOOTHED else None

    def add(self, step: int, value: float) -> None:
        """Note the value of a step; one that is not finite is left out."""
        if not isfinite(value):
            return
        self._latest.append(value)
        if (mean := self.latest) is None:
            return
        if self.first is None:
            self.first = mean
        if mean > self.highest:
            self.highest, self.at = mean, step


class StepAlerts:
    """Finds what is wrong in the metrics of a run's steps."""

    def __init__(self) -> None:
        self._last: Record = {}
        self._reward = Trend()
        self._entropy = Trend()
        self.learning = LearningAlarm()
        """What a live learner says itself."""

    def add(self, row: Record) -> None:
        step = integer(row, "step")
        if step <= integer(self._last, "step"):  # a learner resumed, and what followed is undone
            self._reward, self._entropy = Trend(), Trend()
        self._last = row
        self.learning.look(step, row)
        self._reward.add(step, number(row, "reward/mean"))
        self._entropy.add(step, number(row, "policy/entropy_nats"))

    def words(self, config: RunConfig) -> list[str]:
        return [*self._collapses(), *self._staleness(config), *self._out_of_range(config)]

    def _collapses(self) -> Iterator[str]:
        reward, entropy = self._reward, self._entropy
        if reward.first is not None and reward.latest is not None:
            rise, fall = reward.highest - reward.first, reward.highest - reward.latest
            if rise > 0 and fall > LEAST_FALL * max(rise, abs(reward.highest)):
                yield (
                    f"the reward has collapsed: {reward.latest:.3g} on average over the last {SMOOTHED} "
                    f"steps, {reward.highest:.3g} up to step {reward.at}; go back to a checkpoint of that "
                    "time, with a lower learner.optimizer.lr"
                )
        if entropy.first and entropy.latest is not None and entropy.latest < LEAST_ENTROPY * entropy.first:
            yield (
                f"the entropy has collapsed: {entropy.latest:.3g} nats a token, {entropy.first:.3g} at "
                "first; the policy says nearly the same in every rollout, and hardly explores any more"
            )

    def _staleness(self, config: RunConfig) -> Iterator[str]:
        worst, bound = number(self._last, "staleness/max_versions"), config.admission.max_staleness
        if worst > bound:
            yield (
                f"the last step trained on tokens that are {worst:.0f} versions old, and "
                f"admission.max_staleness is {bound}"
            )

    def _out_of_range(self, config: RunConfig) -> Iterator[str]:
        used = used_diagnostics(config.model, config.learner)
        for name, (lowest, highest, meaning) in ranges(used).items():
            value = number(self._last, name)
            if value < lowest:
                yield f"{name} is {value:.3g}, below {lowest:.3g}: {meaning}"
            elif value > highest:
                yield f"{name} is {value:.3g}, above {highest:.3g}: {meaning}"


def state_alerts(state: RunState) -> list[str]:
    """Return what a live run says that is wrong, beside what `launch status` calls problems."""
    return [*_alarms(state), *_failures(state), *_idle(state)]


def _alarms(state: RunState) -> Iterator[str]:
    for source, alarm in state.monitor.alarms.items():
        yield f"{source} says: {alarm}"


def _failures(state: RunState) -> Iterator[str]:
    ends = state.monitor.recent_ends
    failed = failed_fraction(ends)
    if failed is not None and failed > MOST_FAILED:
        yield f"many episodes fail for reasons outside the policy, {ends_text(ends)}: actors log why"


def _idle(state: RunState) -> Iterator[str]:
    """Yield the actors that ask for leases while others have more than their engines run at a time."""
    actors = state.of_role("actor")
    idle = [one.source for one in actors if waits_for_leases(one)]
    queued = sum(integer(one.values, "waiting") for one in actors)
    if idle and queued:
        named = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
        yield f"no request runs in the engines of {named}, while {queued} requests queue elsewhere"


def disk_alerts(directory: Path) -> list[str]:
    """Return a sentence when the disk of a run's directory is nearly full; none where it is not here."""
    if not directory.exists():
        return []
    disk = shutil.disk_usage(directory)
    if disk.free >= LEAST_FREE * disk.total:
        return []
    return [
        f"the disk of {directory} is nearly full: {size(disk.free)} of {size(disk.total)} are free; make "
        "room, or lower learner.checkpoint.keep and replay.retain_bytes"
    ]


class RunAlerts:
    """Finds what of one run wants attention."""

    def __init__(self, root: Path, name: str) -> None:
        self._run = RunDirectory(root, name)
        self._directory = root / name
        self._recorded: RunConfig | None = None

    def look(self, steps: StepAlerts, state: RunState | None) -> list[str]:
        """Return what is wrong, each in a sentence; `state` is that of a run that answers."""
        config = (None if state is None else state.config) or self._settings()
        found = [] if config is None else steps.words(config)
        if state is None:
            found += [text for text in [steps.learning.text] if text]
        else:
            found += [*state_alerts(state), *disk_alerts(self._directory)]
        return found

    def _settings(self) -> RunConfig | None:
        """Return the settings that the run's directory holds; None where it holds none."""
        try:
            self._recorded = self._recorded or recorded_config(self._run)
        except ConfigError as error:
            log.debug("run_without_settings", run=self._run.name, reason=str(error))
        return self._recorded
