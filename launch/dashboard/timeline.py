"""What the learner and each actor did in the last minutes, as spans of time, and when versions changed."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from bus.codec import Json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record, integer, latest_records, number, older

TAIL_BYTES = 4 << 20
"""Bytes at the end of each file that are read: two thousand steps, or ten thousand seconds of an actor."""
LONGEST_GAP_S = 10.0
"""Time between two reports of an actor beyond which nothing is known of what it did between them."""


@dataclass
class ActorLane:
    """One actor: spans [start, stop, part of the time in which its engines were busy], changes of version
    [time, version], and pauses for new weights [time, seconds]. Times are in seconds since the epoch."""

    source: str
    spans: list[Json] = field(default_factory=list)
    versions: list[Json] = field(default_factory=list)
    pauses: list[Json] = field(default_factory=list)


def timeline(run: RunDirectory, window_s: float) -> dict[str, Json]:
    """Return the lanes of the last `window_s` seconds before the latest report; empty without reports. The
    learner's spans are [start, stop, kind, step], where kind is "waits", "trains" or "publishes"."""
    if not run.exists:
        return {"begin_s": None, "end_s": None, "learner": [], "versions": [], "actors": []}
    steps = [row for row in latest_records(run.metrics, TAIL_BYTES) if "time/step_s" in row]
    counters = [
        row for path in (older(run.counters), run.counters) for row in latest_records(path, TAIL_BYTES)
    ]
    end_s = max((number(row, "time_s") for row in [*steps[-1:], *counters[-1:]]), default=None)
    if end_s is None:
        return {"begin_s": None, "end_s": None, "learner": [], "versions": [], "actors": []}
    begin_s = end_s - window_s
    late = [row for row in steps if number(row, "time_s") > begin_s]
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "learner": [span for row in late for span in _step_spans(row)],
        "versions": [[number(row, "time_s"), integer(row, "train/policy_version")] for row in late],
        "actors": [
            {"source": lane.source, "spans": lane.spans, "versions": lane.versions, "pauses": lane.pauses}
            for lane in _actor_lanes(row for row in counters if number(row, "time_s") > begin_s)
        ],
    }


def _step_spans(row: Record) -> Iterator[Json]:
    """Yield the spans of a step: it waits for its batch, trains, and waits for the publication before."""
    stop_s, step = number(row, "time_s"), integer(row, "step")
    begin_s = stop_s - number(row, "time/step_s")
    trains_s = begin_s + max(0.0, _seconds(row, "time/waiting_for_batch_s"))
    publishes_s = stop_s - max(0.0, _seconds(row, "time/publish_stall_s"))
    for start, end, kind in (
        (begin_s, trains_s, "waits"),
        (trains_s, publishes_s, "trains"),
        (publishes_s, stop_s, "publishes"),
    ):
        if end > start:
            yield [start, end, kind, step]


def _actor_lanes(rows: Iterable[Record]) -> list[ActorLane]:
    reports: defaultdict[str, list[Record]] = defaultdict(list)
    for row in rows:
        reports[str(row.get("source"))].append(row)
    return [_actor_lane(source, found) for source, found in sorted(reports.items())]


def _actor_lane(source: str, reports: list[Record]) -> ActorLane:
    """Return the lane that an actor's counters tell, which only grow."""
    lane = ActorLane(source)
    for before, after in pairwise(reports):
        start_s, stop_s = number(before, "time_s"), number(after, "time_s")
        if 0 < stop_s - start_s <= LONGEST_GAP_S:
            engines = max(1, integer(after, "engine/count"))
            busy = (_seconds(after, "engine/busy_s") - _seconds(before, "engine/busy_s")) / engines
            lane.spans.append([start_s, stop_s, round(min(1.0, max(0.0, busy / (stop_s - start_s))), 3)])
        paused_s = _seconds(after, "engine/pause_s") - _seconds(before, "engine/pause_s")
        if integer(after, "step") != integer(before, "step"):
            lane.versions.append([stop_s, integer(after, "step")])
        if paused_s > 0:
            lane.pauses.append([stop_s, round(paused_s, 6)])
    return lane


def _seconds(row: Record, name: str) -> float:
    value = number(row, name)
    return value if value == value else 0.0
