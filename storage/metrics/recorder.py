"""Records a run's metrics and evaluations in its directory on the storage host, whoever watches."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

import structlog

from bus.codec import decode
from bus.connection import Bus
from bus.errors import BusAwayError, LostDataError, SchemaError
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics, PolicyManifest
from bus.streams.stream_reader import StoredMessage, StreamPosition, StreamReader
from bus.waiting import set_within
from storage.disk.atomic_files import fsync_path, read_json, write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import (
    Record,
    append_latest,
    append_records,
    event_record,
    integer,
    is_counters,
    last_record,
    older,
)

log = structlog.get_logger()
PERIOD_S = 1.0
"""Time between two looks for new events."""
BATCH = 512
PLACE_PERIOD_S = 10.0
"""Time between two notes of the place on the disk."""
LAST_S = 10.0
"""Longest time for the events that are left when storage ends."""
REMEDY = "remove it: what EVENTS still holds is recorded again"


class Sink(Protocol):
    """Takes every row that is recorded, such as a writer of TensorBoard's files."""

    def write(self, row: Record) -> None:
        """Take a row. It runs on the event loop: it must not wait, and what it raises ends storage."""


@dataclass(frozen=True)
class NumberedRow:
    """A row, and the number of its event on the stream."""

    record: Record
    event: int


async def record_metrics(
    bus: Bus, run: RunDirectory, stop: asyncio.Event, *, sinks: Sequence[Sink] = ()
) -> None:
    """Record every event of the run until `stop`, then those that are there by then.

    The place on EVENTS is kept in the run's directory. After a restart the recorder goes on there: no event
    that EVENTS still holds is lost, and none is written twice."""
    files = await asyncio.to_thread(_Files, run)
    reader = StreamReader(bus, "EVENTS", bus.subject("events", ">"), after=files.place)
    stopped_s = 0.0
    while True:
        if stop.is_set():
            stopped_s = stopped_s or time.monotonic()
        try:
            found = await bus.patiently(lambda: reader.take(BATCH), "reading the run's events")
        except BusAwayError as error:
            if not stop.is_set():
                raise
            log.warning(
                "last_events_not_recorded", reason=str(error), remedy="the events are recorded next time"
            )
            break
        rows = [row for message in found if (row := await _row(bus, message)) is not None]
        for row in await asyncio.to_thread(files.append, rows, reader.place, reader.beginnings):
            for sink in sinks:
                sink.write(row.record)
        if stopped_s and (len(found) < BATCH or time.monotonic() > stopped_s + LAST_S):
            break
        if len(found) < BATCH:
            await set_within(stop, PERIOD_S)
    await asyncio.to_thread(files.note_place)


async def _row(bus: Bus, message: StoredMessage) -> NumberedRow | None:
    event = decoded_event(message)
    if event is None:
        return None
    begins, latest = 0, None
    if isinstance(event, EvaluationResult) and (policy := await bus.get("policy", PolicyManifest)):
        begins, latest = policy[0].trains_from, policy[0].policy_version
    record = event_record(event, trains_from=begins, time_s=message.time_s, learner_version=latest)
    return NumberedRow(record, message.place.sequence)


def decoded_event(message: StoredMessage) -> Metrics | EvaluationResult | None:
    """Return the event; None, with a line in the log, for one that is not understood."""
    try:
        return cast("Metrics | EvaluationResult", decode(message.data, Metrics, EvaluationResult))
    except SchemaError as error:
        log.warning("event_not_understood", subject=message.subject, reason=str(error))
        return None


class _Files:
    def __init__(self, run: RunDirectory) -> None:
        self.place = recorded_place(run)
        self._beginnings = 0
        self._noted, self._noted_s = self.place, 0.0
        # asked for once: `run` looks at every directory above a path each time
        self._metrics, self._counters, self._recorded = run.metrics, run.counters, run.recorded
        counters = max(map(_last_event, (older(self._counters), self._counters)))
        self._written = {self._metrics: _last_event(self._metrics), self._counters: counters}
        """The last event of each file, which may lie behind the place that was noted last."""

    def append(
        self, rows: Iterable[NumberedRow], place: StreamPosition, beginnings: int
    ) -> list[NumberedRow]:
        """Append rows, which end at `place`; return those that the files did not have yet. When `beginnings`
        has changed, the stream gives numbers again."""
        if beginnings != self._beginnings:
            self._beginnings, self._written = beginnings, dict.fromkeys(self._written, 0)
            self._note(StreamPosition())
        self.place = place
        new = [row for row in rows if row.event > self._written[self._path(row.record)]]
        for path, append in ((self._counters, append_latest), (self._metrics, append_records)):
            records = [row.record | {"event": row.event} for row in new if self._path(row.record) == path]
            if records:
                append(path, records)
        for row in new:
            self._written[self._path(row.record)] = row.event
        if time.monotonic() > self._noted_s + PLACE_PERIOD_S:
            self.note_place()
        return new

    def note_place(self) -> None:
        """Note the place after what lies before it is durable."""
        if self.place != self._noted:
            for path in (self._metrics, self._counters, older(self._counters)):
                if path.exists():
                    fsync_path(path)
            self._note(self.place)

    def _note(self, place: StreamPosition) -> None:
        write_json(self._recorded, asdict(place))
        self._noted, self._noted_s = place, time.monotonic()

    def _path(self, record: Record) -> Path:
        return self._counters if is_counters(record) else self._metrics


def recorded_place(run: RunDirectory) -> StreamPosition:
    """Return the place up to which the run's files hold its events. Raises `LostDataError` if it is
    garbled."""
    if not run.recorded.exists():
        return StreamPosition()
    found = read_json(run.recorded, REMEDY)
    try:
        return StreamPosition(int(found["sequence"]), int(found["time_ns"]))
    except (TypeError, KeyError, ValueError) as error:
        raise LostDataError(f"{run.recorded} names no place on the bus: {REMEDY}") from error


def _last_event(path: Path) -> int:
    record = last_record(path)
    return 0 if record is None else integer(record, "event")
