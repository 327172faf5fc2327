"""Curves of bounded size: the steps of a run in equal intervals, whatever their number."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.codec import Json
from storage.metrics.records import Record, integer

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
        """Make one interval of each two."""
        empty = _Values()
        for name, join in (
            ("count", np.add), ("sum", np.add), ("low", np.minimum), ("high", np.maximum),
        ):  # fmt: skip
            held, fresh = getattr(self, name), getattr(empty, name)
            fresh[: MOST // 2] = join(held[::2], held[1::2])
            setattr(self, name, fresh)

    def cut(self, begin: int) -> None:
        """Forget the intervals from `begin` on."""
        self.count[begin:], self.sum[begin:] = 0, 0
        self.low[begin:], self.high[begin:] = np.inf, -np.inf

    def mean(self) -> Floats:
        """Return the mean of each interval, NaN where nothing was added."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.sum / self.count


class Buckets:
    """Means and bounds of many quantities over steps, in at most `MOST` intervals of `width` steps.

    Memory is 32 KiB a quantity."""

    def __init__(self) -> None:
        self.width = 1
        """Number of steps in an interval, a power of two."""
        self.last = -1
        """Largest step, -1 before the first."""
        self._values: dict[str, _Values] = {}

    def __len__(self) -> int:
        """Return the number of intervals up to the last step."""
        return 0 if self.last < 0 else self.last // self.width + 1

    @property
    def names(self) -> list[str]:
        """Return the names of the quantities."""
        return [*self._values]

    def append(self, steps: Sequence[int], columns: Mapping[str, Floats]) -> None:
        """Add the values of steps in the order in which they were trained; NaN where there is none.

        A step that does not lie above the one before means that a learner resumed: what followed it is
        forgotten."""
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
        """Forget the intervals that begin at `step` or later."""
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
