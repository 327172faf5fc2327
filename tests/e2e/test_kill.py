"""`launch local` while its processes are killed with SIGKILL one after the other, ranks included."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import (
    GROUPS,
    LONG,
    SAMPLES,
    Command,
    assert_whole,
    part,
    trained_again,
    wait_for_step,
    wait_until,
    with_steps,
)

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS = 12


def rank(launcher: Command, agent: psutil.Process, number: int) -> psutil.Process:
    """The process that is this rank now, once it is there."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        for child in agent.children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                if child.environ().get("TORCHELASTIC_RUN_ID") and _number(child) == number:
                    found.append(child)
        return bool(found)

    wait_until(runs, f"rank {number}", launcher)
    return found[0]


def _number(process: psutil.Process) -> int:
    told = process.environ()
    return int(told["SLUICE_NODE_RANK"]) * int(told["LOCAL_WORLD_SIZE"]) + int(told["LOCAL_RANK"])


def test_a_run_ends_whole_though_every_part_of_it_was_killed(tmp_path: Path):
    launcher = Command(tmp_path, "local", *with_steps(LONG, STEPS), "--learner.world.processes", "2")
    run = tmp_path / "runs/sort"
    try:
        agent = None
        for step, number, resumed in ((2, 1, 2), (3, 0, 4)):
            wait_for_step(launcher, run, step, timeout_s=300)
            wait_until(lambda: any((run / "checkpoints").glob("step_*")), "a checkpoint", launcher)
            agent = agent or part(launcher, "learner")
            rank(launcher, agent, number).kill()
            what = f"{resumed} ranks to resume"
            wait_until(lambda n=resumed: _resumed(run) >= n, what, launcher, timeout_s=120)
        assert "part=learner" not in launcher.said()  # the agent mended it, not the supervisor
        for step, name in ((5, "learner"), (6, "actors"), (8, "storage"), (9, "bus")):
            wait_for_step(launcher, run, step)
            part(launcher, name).kill()
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert _resumed(run) >= 2 * 3
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    report = trained_again(tmp_path)
    assert report["batches_equal"] == report["batches"] == STEPS
    assert report["loss_max_abs_diff"] < 1e-4, report  # other sums of the same numbers


def _resumed(run: Path) -> int:
    """How often a rank went on from a checkpoint since the run began."""
    return (run / "logs/learner.log").read_text().count("resumed ")
