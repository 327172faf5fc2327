"""`launch local` while its processes are killed with SIGKILL one after the other, ranks included."""

import json
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import GROUPS, LONG, SAMPLES, STEPS, Command, assert_whole, part, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]


def rank(agent: psutil.Process, number: int) -> psutil.Process:
    """The process that is this rank now, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in agent.children():
            try:
                if child.environ().get("TORCHELASTIC_RUN_ID") and _number(child) == number:
                    return child
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue
        time.sleep(0.05)
    raise AssertionError(f"rank {number} does not run")


def _number(process: psutil.Process) -> int:
    told = process.environ()
    return int(told["SLUICE_NODE_RANK"]) * int(told["LOCAL_WORLD_SIZE"]) + int(told["LOCAL_RANK"])


def wait_for_checkpoint(run: Path) -> None:
    """Return once there is one to resume from: it is written while training goes on."""
    deadline = time.monotonic() + 60
    while not any((run / "checkpoints").glob("step_*")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)


def wait_for_resumed(run: Path, ranks: int) -> None:
    """Return once so many went on from a checkpoint since the run began."""
    deadline = time.monotonic() + 120
    while (log := (run / "logs/learner.log").read_text()).count("resumed ") < ranks:
        assert time.monotonic() < deadline, log
        time.sleep(0.05)


def test_a_run_ends_whole_though_every_part_of_it_was_killed(tmp_path: Path):
    launcher = Command(tmp_path, "local", *LONG, "--learner.world.processes", "2")
    run = tmp_path / "runs/sort"
    try:
        agent = None
        for step, number, resumed in ((2, 1, 2), (4, 0, 4)):
            wait_for_step(launcher, run, step, timeout_s=300)
            wait_for_checkpoint(run)
            agent = agent or part(launcher, "learner")
            rank(agent, number).kill()
            wait_for_resumed(run, resumed)
        assert "part=learner" not in launcher.said()  # the agent mended it, not the supervisor
        for step, name in ((6, "actors"), (8, "storage"), (10, "bus"), (12, "learner")):
            wait_for_step(launcher, run, step)
            part(launcher, name).kill()
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert (run / "logs/learner.log").read_text().count("resumed ") == 2 * 3
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    report = trained_again(tmp_path)
    assert report["batches_equal"] == report["batches"] == STEPS
    assert report["loss_max_abs_diff"] < 1e-4, report  # other sums of the same numbers


def trained_again(directory: Path) -> dict[str, object]:
    """Return what `launch retrain` reports of the run, by one process."""
    retrained = Command(directory, "retrain", "--run", "sort", "--json")
    try:
        assert retrained.wait(300) == 0, retrained.said()
    finally:
        retrained.kill()
    return json.loads(retrained.said().splitlines()[-1])
