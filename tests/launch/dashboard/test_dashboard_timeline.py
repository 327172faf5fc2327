"""The lanes of the last minutes, from what storage recorded of the learner and the actors."""

from pathlib import Path

import pytest

from launch.dashboard.timeline import timeline
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records, metrics_record
from tests.launch.dashboard.run_on_disk import counters
from tests.launch.messages import metrics


def test_a_step_waits_trains_and_waits_for_its_publication(tmp_path: Path):
    run = RunDirectory(tmp_path, "r")
    append_records(run.metrics, [metrics_record(metrics(n, time_s=100.0 + 2 * n)) for n in range(1, 4)])
    found = timeline(run, 3.0)
    assert (found["begin_s"], found["end_s"]) == (103.0, 106.0)
    assert [(kind, step) for *_, kind, step in found["learner"]] == [
        (kind, step) for step in (2, 3) for kind in ("waits", "trains", "publishes")
    ]
    times = [time for start, stop, *_ in found["learner"][:3] for time in (start, stop)]
    assert times == pytest.approx([102.0, 102.4, 102.4, 103.9, 103.9, 104.0])
    assert found["versions"] == [[104.0, 3], [106.0, 4]]


def test_an_actor_is_busy_changes_versions_and_pauses(tmp_path: Path):
    run = RunDirectory(tmp_path, "r")
    still = counters(2, 105.0) | {"time_s": 107.5}
    long_silent = counters(3, 200.0)
    append_records(run.counters, [counters(1, 102.5), counters(2, 105.0), still, long_silent])
    [lane] = timeline(run, 300.0)["actors"]
    assert lane["spans"] == [[102.5, 105.0, 0.75], [105.0, 107.5, 0.0]]  # nothing is known of the silence
    assert lane["versions"] == [[105.0, 2], [200.0, 3]]
    assert lane["pauses"] == [[105.0, 0.002], [200.0, 0.002]]


def test_a_run_that_reported_nothing_has_no_lanes_and_is_not_made(tmp_path: Path):
    assert timeline(RunDirectory(tmp_path, "none"), 60.0)["end_s"] is None
    assert not (tmp_path / "none").exists()
    run = RunDirectory(tmp_path, "empty")
    assert run.path.is_dir()
    assert timeline(run, 60.0)["actors"] == []
