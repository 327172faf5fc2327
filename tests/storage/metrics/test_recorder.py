"""What storage records of a run: each event once, over restarts, whoever watches."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bus.codec import encode
from bus.connection import Bus
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics, PolicyManifest
from bus.security.permissions import COUNTERS
from bus.streams.publish import Publisher
from bus.topology import ensure
from storage.disk.atomic_files import make_directory
from storage.disk.run_directory import RunDirectory
from storage.metrics.recorder import Sink, record_metrics
from storage.metrics.records import Record, append_records, older, read_records
from storage.metrics.sinks import Points
from tests.storage.serving import BLOB

pytestmark = pytest.mark.nats


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs", "test")


class Rows:
    """A sink that keeps rows."""

    def __init__(self):
        self.rows: list[Record] = []

    def write(self, row: Record) -> None:
        self.rows.append(row)


async def step(bus: Bus, number: int) -> None:
    event = Metrics(source="learner", step=number, time_s=float(number), values={"reward/mean": 0.5})
    await Publisher(bus).publish(bus.subject("events", "metrics"), encode(event), message_id=f"m{number}")


async def counters(bus: Bus, number: int) -> None:
    values = {"engine/busy_s": float(number)}
    event = Metrics(source="actor", step=0, time_s=0.0, values=values)
    await Publisher(bus).publish(bus.subject(COUNTERS), encode(event), message_id=f"c{number}")


async def record_what_is_there(bus: Bus, run: RunDirectory, sinks: Sequence[Sink] = ()) -> None:
    """Record as a storage process does that is told to stop at once: nothing that is there may be left."""
    stop = asyncio.Event()
    stop.set()
    await record_metrics(bus, run, stop, sinks=sinks)


def steps(run: RunDirectory) -> list[object]:
    return [row["step"] for row in read_records(run.metrics)]


def counted(run: RunDirectory) -> list[object]:
    return [
        row["engine/busy_s"] for path in (older(run.counters), run.counters) for row in read_records(path)
    ]


async def test_events_are_recorded_with_nobody_watching(bus: Bus, run: RunDirectory):
    await bus.put("policy", PolicyManifest(
        policy_version=5, incarnation="a", snapshot=BLOB, model=BLOB, stage="rl", trains_from=2
    ))  # fmt: skip
    sink = Rows()
    await step(bus, 1)
    await counters(bus, 7)
    result = EvaluationResult(
        policy_version=5, incarnation="a", sampled=0.7, greedy=0.8, prompts=2, seconds=1.0, failed=1,
        oldest_version=5, newest_version=5,
    )  # fmt: skip
    await Publisher(bus).publish(bus.subject("events", "evaluation"), encode(result), message_id="e5")
    await record_what_is_there(bus, run, [sink])
    await Publisher(bus).publish(
        bus.subject("events", "evaluation"),
        encode(
            replace(
                result,
                policy_version=4,
                oldest_version=4,
                newest_version=4,
                data_set="aime",
                samples=4,
                scores={"pass@4": 0.75},
            )
        ),
        message_id="e4",
    )
    await record_what_is_there(bus, run, [sink])
    trained, evaluated, further = read_records(run.metrics)
    assert (further["data_set"], further["samples"], further["pass@4"]) == ("aime", 4, 0.75)
    assert (evaluated["lag_versions"], further["lag_versions"]) == (0, 1)
    assert "data_set" not in evaluated
    [point] = Points().of(further)
    assert (point.axis, point.values["evaluation/aime/pass@4"]) == ("evaluation/step", 0.75)
    assert (trained["source"], trained["step"], trained["reward/mean"]) == ("learner", 1, 0.5)
    assert (evaluated["kind"], evaluated["step"], evaluated["sampled"]) == ("evaluation", 3, 0.7)
    assert counted(run) == [7.0]
    assert [row["kind"] for row in sink.rows] == ["metrics", "metrics", "evaluation", "evaluation"]


async def test_a_row_costs_no_look_at_the_runs_directory(
    bus: Bus, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    """Thousands of actors send hundreds of counters a second, and each look asks for every parent."""
    looks: list[Path] = []

    def look(path: Path) -> None:
        looks.append(path)
        make_directory(path)

    monkeypatch.setattr("storage.disk.run_directory.make_directory", look)
    found = []
    for numbers in (range(1), range(1, 2), range(2, 30)):
        for number in numbers:
            await counters(bus, number)
        await record_what_is_there(bus, run)
        found.append(len(looks))
    assert found[2] - found[1] == found[1] - found[0]
    assert len(counted(run)) == 30


async def test_restart_loses_no_event_and_writes_none_twice(bus: Bus, run: RunDirectory):
    for number in (1, 2):
        await step(bus, number)
    await counters(bus, 1)
    await record_what_is_there(bus, run)
    for number in (3, 4):
        await step(bus, number)
    await counters(bus, 2)
    await record_what_is_there(bus, run)
    await record_what_is_there(bus, run)
    assert (steps(run), counted(run)) == ([1, 2, 3, 4], [1.0, 2.0])


async def test_kill_between_the_rows_and_the_note_of_the_place_writes_none_twice(bus: Bus, run: RunDirectory):
    """Killed at any moment: the place is an old one, and of one of the files the last row is torn."""
    await step(bus, 1)
    await record_what_is_there(bus, run)
    noted = run.recorded.read_bytes()
    await counters(bus, 1)
    for number in (2, 3):
        await step(bus, number)
    await record_what_is_there(bus, run)
    run.recorded.write_bytes(noted)
    run.metrics.write_bytes(run.metrics.read_bytes()[:-5])
    await counters(bus, 2)
    await record_what_is_there(bus, run)
    assert (steps(run), counted(run)) == ([1, 2, 3], [1.0, 2.0])


async def test_bus_that_lost_its_streams_starts_anew_behind_what_was_recorded(bus: Bus, run: RunDirectory):
    for number in (1, 2, 3):
        await step(bus, number)
    await record_what_is_there(bus, run)
    await bus.js.delete_stream(bus.topology.stream("EVENTS"))
    await ensure(bus.js, bus.topology, shards=2)
    for number in (4, 5, 6, 7):
        await step(bus, number)
    await record_what_is_there(bus, run)
    await record_what_is_there(bus, run)
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]


async def test_counters_lie_apart_and_only_the_latest_are_kept(bus: Bus, run: RunDirectory, monkeypatch):
    monkeypatch.setattr("storage.metrics.records.KEPT_BYTES", 500)
    append_records(run.metrics, [{"step": 0}])
    for number in range(40):
        await counters(bus, number)
        if number % 5 == 4:
            await record_what_is_there(bus, run)
    kept = counted(run)
    assert 5 <= len(kept) < 40
    assert kept == [float(number) for number in range(40 - len(kept), 40)]
    assert steps(run) == [0]


async def test_event_that_is_not_understood_is_passed_over(bus: Bus, run: RunDirectory):
    await Publisher(bus).publish(bus.subject("events", "metrics"), b"?", message_id="x")
    await step(bus, 1)
    await record_what_is_there(bus, run)
    assert steps(run) == [1]
    assert json.loads(run.recorded.read_text())["sequence"] == 2


async def test_recorder_records_while_it_runs(bus: Bus, run: RunDirectory, monkeypatch):
    monkeypatch.setattr("storage.metrics.recorder.PERIOD_S", 0.02)
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        tasks.create_task(record_metrics(bus, run, stop))
        for number in (1, 2):
            await step(bus, number)
            while number not in steps(run):  # noqa: ASYNC110  # a file tells nobody
                await asyncio.sleep(0.01)
        stop.set()
    assert steps(run) == [1, 2]
