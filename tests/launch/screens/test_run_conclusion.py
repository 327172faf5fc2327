"""Storage makes the curves and the summary of a run whose learner is elsewhere."""

import asyncio
import json
from pathlib import Path

import pytest

from bus.connection.bus import Bus
from bus.errors import LostDataError
from launch.run_view.run_files import RunFiles
from launch.screens.conclusion import concluding
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records, metrics_record
from tests.launch.messages import learner, metrics, storage

pytestmark = pytest.mark.nats


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr("launch.run_view.monitor.SILENT_S", 0.2)
    monkeypatch.setattr("launch.screens.conclusion.LOOK_S", 0.05)
    return RunDirectory(tmp_path, "test")


async def test_summary_is_there_when_the_learner_is_done_though_storage_goes_on(bus: Bus, run: RunDirectory):
    append_records(run.metrics, [metrics_record(metrics(step)) for step in (1, 2)])
    async with asyncio.timeout(30), concluding(bus, RunConfig(run="test"), run):
        for status in (storage(), learner(stage="done", step=2)):
            await bus.notify(bus.subject("status", status.role), status)
        while not run.summary.exists():  # noqa: ASYNC110  # a file tells nobody
            await asyncio.sleep(0.02)
        assert run.curves.exists()
    summary = json.loads(run.summary.read_text())
    assert (summary["stage"], summary["steps"], summary["policy_version"]) == ("done", 2, 3)
    assert summary["groups"]["trained"] == 640


@pytest.mark.parametrize("garbled", [b"", b'{"step": 4'], ids=["empty", "cut"])
async def test_a_garbled_progress_names_the_file_and_the_remedy(run: RunDirectory, garbled: bytes):
    (run.path / "progress.json").write_bytes(garbled)
    with pytest.raises(
        LostDataError, match=r"progress\.json is not JSON .*: remove it: the learner writes it anew"
    ):
        assert RunFiles(run.path).progress


async def test_storage_that_is_stopped_before_the_end_makes_them_too(bus: Bus, run: RunDirectory):
    append_records(run.metrics, [metrics_record(metrics(1))])
    async with concluding(bus, RunConfig(run="test"), run):
        pass
    assert run.curves.exists()
    assert run.summary.exists()


async def test_storage_that_heard_no_learner_leaves_the_summary_as_it_is(bus: Bus, run: RunDirectory):
    append_records(run.metrics, [metrics_record(metrics(1))])
    write_json(run.summary, {"steps": 400})
    async with concluding(bus, RunConfig(run="test"), run):
        pass
    assert json.loads(run.summary.read_text()) == {"steps": 400}


async def test_run_that_trained_nothing_has_no_summary(bus: Bus, run: RunDirectory):
    async with concluding(bus, RunConfig(run="test"), run):
        pass
    assert not run.summary.exists()
