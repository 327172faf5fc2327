"""`launch runs stop`: ends the supervisor that holds the run's lock, and nobody else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bus.errors import ConfigError, SluiceError
from launch.operations import run_stop
from launch.operations.run_stop import stop_run

HOLD = """
import os, pathlib, signal, sys
lock = open(sys.argv[1], "a+")
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else lambda *_: sys.exit(0))
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "mine/replay/shard_00").mkdir(parents=True)
    (tmp_path / "mine/config.json").write_text("{}")
    return tmp_path / "mine"


@contextmanager
def holding(file: Path, *, deaf: bool = False) -> Iterator[subprocess.Popen]:
    """Run a process that has the file open until SIGTERM."""
    command = [sys.executable, "-c", HOLD, str(file), "deaf" if deaf else "hearing"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_the_supervisor_is_ended_and_waited_for(run: Path):
    with holding(run / "lock") as process:
        (run / "lock").write_text(str(process.pid))
        assert stop_run(run, 20) == ("run 'mine' has stopped; the command that started it takes it up again")
        assert process.wait(60) == 0


def test_a_run_that_does_not_go_on_needs_no_stop(run: Path):
    (run / "lock").write_text(str(os.getpid()))
    assert "not going on, on this host: nothing to stop" in stop_run(run, 20)


def test_another_users_run_is_not_said_to_have_ended(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: run.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"belongs to \w+, whose processes this user cannot see"):
        stop_run(run, 20)


def test_a_number_that_another_process_got_is_left_alone(run: Path):
    with holding(run / "replay/shard_00/.lock") as shard, holding(run / "elsewhere") as other:
        (run / "lock").write_text(str(other.pid))
        with pytest.raises(ConfigError, match=rf"was not started by `launch local`.*are {shard.pid} \("):
            stop_run(run, 20)
        assert (shard.poll(), other.poll()) == (None, None)


def test_a_job_of_slurm_is_not_told_to_be_ended_by_its_processes(run: Path):
    (run / "slurm").mkdir()
    (run / "slurm/bus").write_text("nats://node:14222")
    with holding(run / "replay/shard_00/.lock") as shard:
        (run / "lock").write_text("")
        with pytest.raises(ConfigError, match=r"=USR2 --me --name=sluice-mine`.*=sluice-mine,sluice-"):
            stop_run(run, 20)
        assert shard.poll() is None
    with pytest.raises(ConfigError, match="is a job of Slurm"):  # on a host that is none of its own
        stop_run(run, 20)


def test_one_that_does_not_end_in_time_is_named_also_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_stop, "SLOW_S", 0.05)
    with holding(run / "lock", deaf=True) as process:
        (run / "lock").write_text(str(process.pid))
        refused = rf"has not ended within 0\.5 s.*processes are {process.pid}"
        with capture_logs() as logs, pytest.raises(SluiceError, match=refused):
            stop_run(run, 0.5)
        [said] = logs
        assert said["event"] == "run_still_ends"
        assert said["processes"].startswith(f"{process.pid} (")
