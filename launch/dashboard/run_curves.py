"""The curves of one run, gathered from the rows of its metrics, as the page draws them."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from math import isfinite

import numpy as np

from bus.codec import Json
from launch.dashboard.alerts import StepAlerts
from launch.dashboard.buckets import HEAD, MOST, Buckets, Floats, columns, steps_of
from launch.dashboard.charts import CHARTS, with_computed
from storage.metrics.records import Record, integer, number

NOT_SCORES = {
    *HEAD, "policy_version", "incarnation", "prompts", "seconds", "oldest_version", "newest_version",
    "failed", "data_set", "samples", "lag_versions",
}  # fmt: skip
HELD_OUT = "held-out"
DIGITS = 6
"""Significant digits of the values that are sent."""


class ScoreCurves:
    """Results by the step that made the evaluated weights, in any order.

    The latest are kept one by one, so that a step's next result replaces the one before; the others as
    intervals of steps."""

    def __init__(self) -> None:
        self._latest: dict[int, Record] = {}
        self._older = Buckets()

    def add(self, row: Record) -> None:
        """Add a result; an earlier one of the same step was of weights that are undone."""
        self._latest[integer(row, "step")] = row
        if len(self._latest) > 2 * MOST:
            early = [self._latest.pop(step) for step in sorted(self._latest)[:MOST]]
            self._older.add(steps_of(early), columns(early, NOT_SCORES))

    def forget_undone(self, step: Record) -> None:
        """Forget the results of weights that a learner has undone which trained this step again."""
        first, time_s = integer(step, "step"), number(step, "time_s")
        self._older.forget_from(first)
        self._latest = {
            n: row for n, row in self._latest.items() if n < first or number(row, "time_s") > time_s
        }

    @property
    def curves(self) -> Buckets:
        """Return the scores in intervals of steps."""
        found = deepcopy(self._older)
        if self._latest:
            rows = [self._latest[step] for step in sorted(self._latest)]
            found.add(steps_of(rows), columns(rows, NOT_SCORES))
        return found


class RunCurves:
    """Curves over the steps of reinforcement learning, and the scores of each data set. Its size is bounded,
    whatever the run's length."""

    def __init__(self) -> None:
        self.steps = Buckets()
        self.warmup = Buckets()
        """Steps of the supervised stage before, which are counted for themselves."""
        self.alerts = StepAlerts()
        """What is wrong in the latest steps."""
        self._scores: dict[str, ScoreCurves] = {}
        self._last = -1

    def add(self, rows: Iterable[Record]) -> bool:
        """Add rows in their order; tells whether any of them was drawn."""
        steps: list[Record] = []
        warmup: list[Record] = []
        scored = False
        for row in rows:
            if row.get("kind") == "evaluation":
                self._scores.setdefault(str(row.get("data_set", HELD_OUT)), ScoreCurves()).add(row)
                scored = True
            elif row.get("train/stage") == "rl" and row.get("source") == "learner":
                self._forget_undone(row)
                self.alerts.add(row)
                steps.append(with_computed(row))
            elif row.get("train/stage") == "warmup":
                warmup.append(row)
        if steps:
            self.steps.append(steps_of(steps), columns(steps, HEAD))
        if warmup:
            self.warmup.append(steps_of(warmup), columns(warmup, HEAD))
        return scored or bool(steps or warmup)

    def _forget_undone(self, row: Record) -> None:
        """Forget evaluations of weights that are undone if a learner resumed with this step: it does not lie
        above the one before."""
        step = integer(row, "step")
        if step <= self._last:
            for scores in self._scores.values():
                scores.forget_undone(row)
        self._last = step

    def payload(self, *, everything: bool = False, begin: int = 0) -> dict[str, Json]:
        """Return what the page draws from step `begin` on: the curves of the charts, or every quantity that
        the rows have. The warm-up and the scores of data sets are always all there."""
        names = self.steps.names
        if not everything:
            names = [name for name in names if _is_drawn(name, warmup=False)]
        warmup = [name for name in self.warmup.names if _is_drawn(name, warmup=True)]
        return {
            "steps": _table(self.steps, [name for name in names if name != "time_s"], begin),
            "warmup": _table(self.warmup, warmup),
            "evaluations": {
                name: _all_scores(self._scores[name])
                for name in sorted(self._scores, key=lambda name: name != HELD_OUT)
            },
        }


def _is_drawn(name: str, *, warmup: bool) -> bool:
    return any(chart.draws(name) for chart in CHARTS if chart.warmup is warmup)


def _all_scores(scores: ScoreCurves) -> dict[str, Json]:
    curves = scores.curves
    return _table(curves, [name for name in curves.names if name != "time_s"])


def _table(buckets: Buckets, names: Sequence[str], begin: int = 0) -> dict[str, Json]:
    """Return the intervals that have any value, from step `begin` on: their first steps, times and columns of
    values."""
    time_s = buckets.mean("time_s")
    there = np.isfinite(time_s)
    there[: begin // buckets.width] = False
    table: dict[str, Json] = {
        "width": buckets.width,
        "step": [*(np.flatnonzero(there) * buckets.width).tolist()],
        "time_s": [round(value, 1) for value in time_s[there].tolist()],
    }
    drawn: dict[str, Json] = {}
    for name in names:
        column: dict[str, Json] = {"mean": _rounded(buckets.mean(name)[there])}
        if buckets.width > 1:
            low, high = buckets.bounds(name)
            column |= {"low": _rounded(low[there]), "high": _rounded(high[there])}
        drawn[name] = column
    return table | {"columns": drawn}


def _rounded(values: Floats) -> list[Json]:
    return [float(f"{value:.{DIGITS}g}") if isfinite(value) else None for value in values.tolist()]
