"""Turns rows of metrics into one column of numbers for each quantity."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bus.codec import Json
from launch.dashboard.buckets import Floats
from storage.metrics.records import Record, integer

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
