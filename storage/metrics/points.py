"""Rows of metrics as points of curves: names, and a step that each kind of row counts for itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from time import monotonic

from bus.actor_counters import INFRA_FAILED_FRACTION, RECENT_EPISODES, RECENT_INFRA_FAILED
from bus.codec import Json
from storage.metrics.records import Record, integer, is_counters, number

COUNTERS_PERIOD_S = 10.0
"""Seconds between two points of the actors' counters."""
COUNTERS_KEPT_S = 60.0
"""Seconds after which an actor that sends no counters is left out of the sums."""
_NO_VALUES = {"time_s", "step", "event"}
_GREATEST = {"engine/probe_nats"}
"""Counters of which the greatest of all actors is drawn: a sum would say nothing."""


@dataclass(frozen=True)
class Point:
    """Values of one moment."""

    axis: str
    """Name of the step that they are drawn over."""
    step: int
    time_s: float
    """Seconds since the epoch."""
    values: dict[str, float]


class Points:
    """Makes points of rows. Of actors, which come and go, the sums of the counters are drawn, or the
    greatest where a sum says nothing."""

    def __init__(self) -> None:
        self._counters: dict[str, tuple[float, Record]] = {}
        """The latest counters of each actor, and when they came."""
        self._drawn_s = -COUNTERS_PERIOD_S

    def of(self, row: Record) -> Iterator[Point]:
        """Return the points of a row; counters give one every `COUNTERS_PERIOD_S`."""
        if is_counters(row):
            yield from self._of_counters(row, monotonic())
            return
        values = dict(_numbers(row))
        axis = "step"
        if row.get("kind") == "evaluation":
            area = "/".join(["evaluation", *([str(row["data_set"])] if "data_set" in row else [])])
            axis, values = "evaluation/step", _prefixed(area, values)
        elif row.get("train/stage") == "warmup":  # its steps begin at 1 as those after it do
            axis, values = "warmup/step", _prefixed("warmup", values)
        elif row.get("source") != "learner":
            source = str(row.get("source"))
            axis, values = f"{source}/step", _prefixed(source, values)
        yield Point(axis, integer(row, "step"), number(row, "time_s"), values)

    def _of_counters(self, row: Record, now_s: float) -> Iterator[Point]:
        self._counters[str(row.get("source"))] = now_s, row
        if now_s - self._drawn_s < COUNTERS_PERIOD_S:
            return
        self._drawn_s = now_s
        self._counters = {
            source: (at_s, latest)
            for source, (at_s, latest) in self._counters.items()
            if now_s - at_s < COUNTERS_KEPT_S
        }
        sums: dict[str, float] = {"actors/count": float(len(self._counters))}
        for _, latest in self._counters.values():
            for name, value in _numbers(latest):
                before = sums.get(f"actors/{name}", 0.0)
                sums[f"actors/{name}"] = max(before, value) if name in _GREATEST else before + value
        if episodes := sums.get(f"actors/{RECENT_EPISODES}"):
            failed = sums.get(f"actors/{RECENT_INFRA_FAILED}", 0.0)
            sums[f"actors/{INFRA_FAILED_FRACTION}"] = failed / episodes
        yield Point("actors/policy_version", integer(row, "step"), number(row, "time_s"), sums)


def _numbers(row: Record) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name not in _NO_VALUES and _is_number(value):
            yield name, number(row, name) if not isinstance(value, bool) else float(value)


def _is_number(value: Json) -> bool:
    return isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))


def _prefixed(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
