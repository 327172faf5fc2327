"""How the latest launch of a run ended is told by every reader of its files."""

import asyncio
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bus.errors import ConfigError, StorageError
from launch.dashboard.run_list import facts_of_runs
from launch.process.run_ending import noted_ending
from launch.run_view.recorded_runs import RecordedRun, recorded_runs
from launch.screens.run_tables import whole_run
from storage.disk.run_directory import RunDirectory
from tests.launch.recorded_run import record

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from launch.process.run_ending import noted_ending
from storage.disk.run_directory import RunDirectory
with noted_ending(RunDirectory(Path(sys.argv[1]), "mine"), asyncio.Event()):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def found(root: Path) -> RecordedRun:
    """The run "mine", of which each reader says the same."""
    [run] = recorded_runs([root / "mine"])
    [facts] = facts_of_runs(root, ["mine"])
    shown = whole_run(root / "mine")
    told = {(run.state, run.problem), *((one["state"], one["problem"]) for one in (facts, shown))}
    assert len(told) == 1
    return run


def raising(error: BaseException, *, stops: bool = False) -> Callable[[asyncio.Event], None]:
    def fail(stop: asyncio.Event) -> None:
        if stops:
            stop.set()
        raise error

    return fail


@pytest.mark.parametrize(
    ("inside", "state", "problem"),
    [
        (lambda stop: None, "stopped", ""),  # such as storage whose learner goes on elsewhere
        (lambda stop: stop.set(), "stopped", ""),
        (raising(KeyboardInterrupt()), "stopped", ""),
        (
            raising(ConfigError("learner ended with status 2: no GPU")),
            "failed",
            "learner ended with status 2: no GPU",
        ),
        (raising(BaseExceptionGroup("", [StorageError("full")])), "failed", "full"),
        (raising(TypeError("a bug")), "failed", "TypeError: a bug"),
        (raising(StorageError("full"), stops=True), "stopped", "full"),  # no checkpoint was saved
    ],
)
def test_a_run_tells_how_it_ended(tmp_path: Path, inside: Callable, state: str, problem: str):
    record(tmp_path, "mine", rewards=[0.5])
    stop = asyncio.Event()
    with suppress(BaseException), noted_ending(RunDirectory(tmp_path, "mine"), stop):
        inside(stop)
    assert (found(tmp_path).state, found(tmp_path).problem) == (state, problem)


def test_a_run_whose_process_was_killed_is_lost_until_it_goes_on(tmp_path: Path):
    record(tmp_path, "mine", rewards=[0.5, 0.5])
    assert found(tmp_path).state == "stopped"  # by a build that noted nothing
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    assert found(tmp_path).state == "lost"
    (tmp_path / "mine" / "progress.json").write_text(json.dumps({"stage": "done", "step": 2}))
    assert found(tmp_path).state == "finished"  # what its learner wrote counts
    (tmp_path / "mine" / "progress.json").write_text(json.dumps({"stage": "done", "step": 1}))
    assert (found(tmp_path).state, found(tmp_path).stage) == ("lost", "rl")  # it had gone on
    (tmp_path / "mine" / "ending.json").write_text(json.dumps({"state": "lost", "host": "elsewhere"}))
    assert found(tmp_path).state == "unseen"  # it may go on there


def test_a_full_disk_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDirectory(tmp_path, "mine")

    def full(path: Path, value: object) -> None:
        if value != {"state": "lost", "host": platform.node()}:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("launch.process.run_ending.write_json", full)
    with pytest.raises(StorageError, match="the true error"), noted_ending(run, asyncio.Event()):
        raise StorageError("the true error")


def test_a_run_on_demonstrations_alone_trains_from_its_first_step_of_them(tmp_path: Path):
    path = record(tmp_path, "mine", rewards=[], learner={"steps": 0}, warmup={"steps": 40})
    with (path / "lock").open("w"):  # as a run that goes on has it
        assert found(tmp_path).state == "starting"
        row = {"step": 7, "kind": "metrics", "source": "learner", "train/stage": "warmup"}
        (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        run = found(tmp_path)
        assert (run.state, run.step, run.steps) == ("training", 7, 40)
        (path / "progress.json").unlink()
        assert found(tmp_path).stage == "warmup"
