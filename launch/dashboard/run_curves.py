"""The curves of one run, gathered from the rows of its metrics, as the page draws them."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.codec import Json
from launch.dashboard.alerts import StepAlerts
from launch.dashboard.charts import CHARTS, with_computed
from storage.metrics.records import Record, integer, number

MOST = 1024
"""Intervals that are kept; when a step lies beyond them, each two become one."""
Floats = NDArray[np.float64]


class _Values:
    """Count, sum, least and greatest of one quantity in each interval."""

    def __init__(self) -> None:
        self.count = np.zeros(MOST, np.int64)
        self.sum = np.zeros(MOST)
        self.low = np.full(MOST, np.inf)
        self.high = np.full(MOST, -np.inf)

    def add(self, at: NDArray[np.int64], values: Floats) -> None:
        """Add values at these intervals; those that are not finite are left out."""
        finite = np.isfinite(values)
        at, values = at[finite], values[finite]
        np.add.at(self.count, at, 1)
        np.add.at(self.sum, at, values)
        np.minimum.at(self.low, at, values)
        np.maximum.at(self.high, at, values)

    def halve(self) -> None:
        empty = _Values()
        for name, join in (("count", np.add), ("sum", np.add), ("low", np.minimum), ("high", np.maximum)):
            held, fresh = getattr(self, name), getattr(empty, name)
            fresh[: MOST // 2] = join(held[::2], held[1::2])
            setattr(self, name, fresh)

    def cut(self, begin: int) -> None:
        self.count[begin:], self.sum[begin:] = 0, 0
        self.low[begin:], self.high[begin:] = np.inf, -np.inf

    def mean(self) -> Floats:
        """Return the mean of each interval, NaN where nothing was added."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sum / self.count


class Buckets:
    """Means and bounds of many quantities over steps, in at most `MOST` intervals of `width` steps. Memory is
    32 KiB a quantity."""

    def __init__(self) -> None:
        self.width = 1
        """Number of steps in an interval, a power of two."""
        self.last = -1
        """Largest step, -1 before the first."""
        self._values: dict[str, _Values] = {}

    def __len__(self) -> int:
        return 0 if self.last < 0 else self.last // self.width + 1

    @property
    def names(self) -> list[str]:
        return [*self._values]

    def append(self, steps: Sequence[int], columns: Mapping[str, Floats]) -> None:
        """Add the values of steps in the order in which they were trained; NaN where there is none. A step
        that does not lie above the one before means that a learner resumed: what followed it is forgotten."""
        numbers = np.asarray(steps, np.int64)
        resumed = np.flatnonzero(np.diff(numbers, prepend=self.last) <= 0)
        for begin, end in zip([0, *resumed], [*resumed, len(numbers)], strict=True):
            if begin < end:
                self.forget_from(int(numbers[begin]))
                part = slice(begin, end)
                self.add(steps[part], {name: column[part] for name, column in columns.items()})

    def add(self, steps: Sequence[int], columns: Mapping[str, Floats]) -> None:
        """Add the values of steps in any order; NaN where there is none."""
        self.last = max(self.last, *steps)
        while self.last // self.width >= MOST:
            self.width *= 2
            for values in self._values.values():
                values.halve()
        at = np.asarray(steps, np.int64) // self.width
        for name, column in columns.items():
            self._values.setdefault(name, _Values()).add(at, column)

    def forget_from(self, step: int) -> None:
        if step > self.last:
            return
        for values in self._values.values():
            values.cut(-(-step // self.width))
        self.last = step - 1

    def mean(self, name: str) -> Floats:
        """Return the mean of each interval up to the last step; NaN where the quantity has no value."""
        values = self._values.get(name)
        return np.full(len(self), np.nan) if values is None else values.mean()[: len(self)]

    def bounds(self, name: str) -> tuple[Floats, Floats]:
        """Return the least and the greatest value of each interval; infinite where there is none."""
        values = self._values.get(name) or _Values()
        return values.low[: len(self)], values.high[: len(self)]


HEAD = {"time_s", "source", "step", "kind", "event"}
"""What rows have besides quantities."""


def steps_of(rows: Sequence[Record]) -> list[int]:
    """Return the step of each row."""
    return [integer(row, "step") for row in rows]


def columns(rows: Sequence[Record], without: set[str]) -> dict[str, Floats]:
    """Return the quantities of rows by name, and their times; NaN where a row has no number."""
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if isinstance(value, int | float)
    )
    return {
        name: _column(rows, name) for name in ("time_s", *names) if name == "time_s" or name not in without
    }


def _column(rows: Sequence[Mapping[str, Json]], name: str) -> Floats:
    values: list[Any] = [row.get(name) for row in rows]
    try:
        return np.asarray(values, np.float64)  # None becomes NaN
    except (TypeError, ValueError):  # a quantity that is a number in some rows only
        return np.asarray([v if isinstance(v, int | float) else np.nan for v in values], np.float64)


NOT_SCORES = {
    *HEAD, "policy_version", "incarnation", "prompts", "seconds", "oldest_version", "newest_version",
    "failed", "data_set", "samples", "lag_versions",
}  # fmt: skip
HELD_OUT = "held-out"
DIGITS = 6
"""Significant digits of the values that are sent."""


class ScoreCurves:
    """Results by the step that made the evaluated weights, in any order. The latest are kept one by one, so
    that a step's next result replaces the one before; the others as intervals of steps."""

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
