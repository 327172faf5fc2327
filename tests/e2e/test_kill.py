"""`launch local` while its processes are killed with SIGKILL one after the other."""

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import Command

pytestmark = [pytest.mark.slow, pytest.mark.nats]
STEPS, GROUPS, SAMPLES = 24, 4, 4
SETTINGS = (
    "--preset", "sort", "--warmup.steps", "2", "--learner.steps", str(STEPS),
    "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
    "--learner.checkpoint.save-every", "4", "--evaluation.every-versions", "0",
    "--learner.target-accuracy", "1.0",
)  # fmt: skip


def part(launcher: Command, name: str) -> psutil.Process:
    """The running process of one part, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(launcher.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if child.cmdline()[3:4] == [name]:
                    return child
    raise AssertionError(f"{name} does not run:\n{launcher.said()}")


def wait_for_step(launcher: Command, run: Path, step: int, *, timeout_s: float = 120.0) -> None:
    """Return once a step was trained."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert launcher.process.poll() is None, launcher.said()
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        records = [json.loads(line) for line in lines]
        if any(r.get("train/stage") == "rl" and r["step"] >= step for r in records):
            return
        psutil.Process(launcher.process.pid).cpu_percent(interval=0.1)
    raise AssertionError(f"step {step} was not reached:\n{launcher.said()}")


def test_a_run_ends_whole_though_every_part_of_it_was_killed(tmp_path: Path):
    launcher = Command(tmp_path, "local", *SETTINGS)
    run = tmp_path / "runs/sort"
    try:
        for step, name in ((2, "actors"), (5, "storage"), (9, "bus"), (13, "learner")):
            wait_for_step(launcher, run, step)
            part(launcher, name).kill()
        assert launcher.wait(240) == 0, launcher.said()
    finally:
        launcher.kill()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["trajectories_trained"] == STEPS * GROUPS * SAMPLES
    assert summary["groups"]["trained"] == STEPS * GROUPS
    assert summary["accounted"]
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
