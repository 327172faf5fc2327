"""`launch local` with learner and engines taking turns on the same device: never both, whoever is killed."""

import json
import signal
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.e2e.colocated_runs import COLOCATED, assert_took_turns, said
from tests.e2e.commands import GROUPS, LONG, SAMPLES, Command, assert_whole, part, wait_for_step

pytestmark = [pytest.mark.nats, pytest.mark.timeout(900)]
STEPS = 6


def run_of(steps: int) -> tuple[str, ...]:
    flags = [str(steps) if before == "--learner.steps" else flag for before, flag in pairwise(("", *LONG))]
    return (*flags, *COLOCATED)


def stopped_in_a_hold(launcher: Command, run: Path) -> tuple[psutil.Process, str]:
    """The learner, standing still while it has the device, and the name of that hold."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        learner = part(launcher, "learner")
        learner.send_signal(signal.SIGSTOP)
        event, hold, *_ = (said(run, "learner") or [("", "")])[-1]
        if event == "device_held":
            return learner, hold
        learner.send_signal(signal.SIGCONT)
        psutil.Process(launcher.process.pid).cpu_percent(interval=0.03)
    raise AssertionError(f"the learner never had the device:\n{launcher.said()}")


def wait_for(condition, what: str, launcher: Command) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert launcher.process.poll() is None, launcher.said()
        assert time.monotonic() < deadline, f"waited 120 s for {what}"
        psutil.Process(launcher.process.pid).cpu_percent(interval=0.1)


# By day test_lora_of_experts_run.py has a run whose parties take turns.
@pytest.mark.nightly
def test_the_learner_trains_while_the_engines_stand_still_and_only_then(tmp_path: Path):
    launcher = Command(tmp_path, "local", *run_of(STEPS))
    run = tmp_path / "runs/sort"
    try:
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert_took_turns(run, steps=STEPS)


@pytest.mark.nightly
def test_the_engines_go_on_when_the_learner_falls_silent_while_it_has_the_device(tmp_path: Path):
    launcher = Command(tmp_path, "local", *run_of(2000)[:-1], "5")
    run = tmp_path / "runs/sort"

    def taken_back():
        return any(event == "device_taken_back" and name == hold for event, name, *_ in said(run, "actors"))

    try:
        wait_for_step(launcher, run, 3, timeout_s=240)
        learner, hold = stopped_in_a_hold(launcher, run)
        wait_for(taken_back, "the engines to go on", launcher)
        assert "learner_silent" in (run / "logs/actors.log").read_text()
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        reached = max(row["step"] for row in rows if row.get("train/stage") == "rl")
        learner.kill()
        wait_for_step(launcher, run, reached + 1, timeout_s=240)
        part(launcher, "actors").kill()
        more = 7  # than there are batches without actors
        wait_for_step(launcher, run, reached + 1 + more, timeout_s=240)
        assert launcher.stop(150) == 0, launcher.said()
    finally:
        launcher.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accounted"]
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]
