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
STEPS = 9


def first_rank(launcher: Command, agent: psutil.Process) -> psutil.Process:
    """The process that is rank 0 now, once it is there."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        for child in agent.children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                told = child.environ()
                if told.get("TORCHELASTIC_RUN_ID") and told["LOCAL_RANK"] == "0":
                    found.append(child)
        return bool(found)

    wait_until(runs, "rank 0", launcher)
    return found[0]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_run_ends_whole_though_every_part_of_it_was_killed(tmp_path: Path, ranks: int):
    """That another rank's death is mended alike, test_torchrun.py tests without a learner."""
    launcher = Command(tmp_path, "local", *with_steps(LONG, STEPS), "--learner.world.processes", str(ranks))
    run = tmp_path / "runs/sort"
    try:
        wait_for_step(launcher, run, 1, timeout_s=300)
        wait_until(lambda: any((run / "checkpoints").glob("step_*")), "a checkpoint", launcher)
        if ranks > 1:
            first_rank(launcher, part(launcher, "learner")).kill()
            wait_until(lambda: _resumed(run) >= ranks, "all ranks to resume", launcher)
            assert "part=learner" not in launcher.said()  # the agent mended it, not the supervisor
        for step, name in ((3, "learner"), (4, "actors"), (5, "storage"), (6, "bus")):
            wait_for_step(launcher, run, step)
            part(launcher, name).kill()
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert _resumed(run) >= (2 * ranks if ranks > 1 else 1)
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    report = trained_again(tmp_path)
    assert report["batches_equal"] == report["batches"] == STEPS
    assert report["loss_max_abs_diff"] < 1e-4, report  # other sums of the same numbers


def _resumed(run: Path) -> int:
    """How often a rank went on from a checkpoint since the run began."""
    return (run / "logs/learner.log").read_text().count("resumed ")
