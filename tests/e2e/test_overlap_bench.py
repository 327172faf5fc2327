"""`launch bench overlap` on a tiny model: two modes in one run, the account of all of it, and early ends."""

import json
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.overlap_record import Heard
from storage.disk.run_directory import RunDirectory
from tests.e2e.commands import Command

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900)]
STEPS, STALENESS, GROUPS, SAMPLES = 4, 2, 4, 4
BURST = STALENESS + 1


def bench(directory: Path, *arguments: str) -> Command:
    return Command(
        directory, "bench", "overlap", "--json", "--rounds", "1", "--prompt-tokens", "16",
        "--admission.max-staleness", str(STALENESS), "--admission.groups-per-step", str(GROUPS),
        "--admission.samples-per-prompt", str(SAMPLES), "--actors.environment.lengths.median", "12",
        *arguments,
    )  # fmt: skip


def reported(command: Command) -> dict:
    [line] = [line for line in command.said().splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.mark.nightly
def test_both_modes_are_measured_in_one_run_that_loses_nothing(tmp_path: Path):
    command = bench(tmp_path, "--steps", str(STEPS))
    try:
        assert command.wait(800.0) == 0, command.said()
    finally:
        command.kill()
    report = reported(command)
    assert report["ratios"].keys() == report["limited_by"].keys() == report["limits"].keys() | {"slots_idle"}
    assert report["ratios"]["async_over_sync"] > 0
    assert (report["ended"], report["cut"]) == ("well", None)
    modes, account = report["modes"], report["account"]
    assert [turn["mode"] for turn in report["absolute"]["turns"]] == ["async", "sync"]
    assert modes["sync"]["staleness_max"] == 0
    assert modes["async"]["staleness_max"] <= STALENESS
    for mode in modes.values():
        assert mode["steps"] == STEPS
        assert mode["trajectories_per_s"] * mode["step_s"] == pytest.approx(GROUPS * SAMPLES)
        for idle in ("learner_idle", "engine_idle", "slots_idle"):
            assert 0 <= mode[idle] < 1, idle
    assert (account["lost"], account["trained_too_often"], account["trained_but_not_in_ledger"]) == (0, 0, 0)
    assert account["trajectories_trained"] == account["steps"] * GROUPS * SAMPLES
    assert account["max_staleness_seen"] <= STALENESS


@pytest.mark.nightly
def test_a_bench_that_is_stopped_reports_what_was_measured_and_leaves_nothing_behind(tmp_path: Path):
    command = bench(tmp_path, "--steps", "1000000")
    try:
        deadline, last = time.monotonic() + 600.0, 3 * BURST
        while not _has_measured(tmp_path, last):
            assert command.process.poll() is None, command.said()
            assert time.monotonic() < deadline, command.said()
            time.sleep(0.2)
        left = psutil.Process(command.process.pid).children(recursive=True)
        command.process.terminate()
        assert command.wait(60.0) == 1, command.said()
    finally:
        command.kill()
    assert len(left) >= 6  # launch local, its four parts, nats-server
    assert not [process for process in left if _runs(process)]
    report = reported(command)
    assert "stopped while async was measured" in report["cut"]
    assert (report["ended"], report["account"]) == (f"killed: {report['cut']}", None)
    [turn] = report["absolute"]["turns"]
    assert (turn["first"], turn["cut"]) == (2 * BURST, True)
    assert report["modes"]["async"]["steps"] in range(BURST, 1_000_000, BURST)
    assert (report["modes"]["sync"], report["ratios"]["async_over_sync"]) == (None, None)


@pytest.mark.nightly
def test_a_limit_that_ends_before_the_first_step_is_an_error_and_leaves_nothing_behind(tmp_path: Path):
    command = bench(tmp_path, "--limit-s", "5")
    try:
        assert command.wait(120.0) == 1, command.said()
    finally:
        command.kill()
    assert "nothing was measured: the limit of 5 s came before the first step" in command.said()
    directory = str(tmp_path)
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if directory in _command_line(process)
    ]


def _command_line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


def _has_measured(directory: Path, step: int) -> bool:
    """Tell whether a step was trained, and the actors were heard after it."""
    for run in directory.glob("runs/overlap/*/overlap"):
        heard = Heard.of(RunDirectory(run.parent, run.name))
        return any(heard.has_read_after(number) for number in heard.steps if number >= step)
    return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
