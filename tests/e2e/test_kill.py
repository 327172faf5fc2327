"""`launch local` while its processes are killed with SIGKILL one after the other."""

from pathlib import Path

import psutil
import pytest

from tests.e2e.commands import GROUPS, LONG, SAMPLES, STEPS, Command, assert_whole, part, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.nats]


def test_a_run_ends_whole_though_every_part_of_it_was_killed(tmp_path: Path):
    launcher = Command(tmp_path, "local", *LONG)
    run = tmp_path / "runs/sort"
    try:
        for step, name in ((2, "actors"), (5, "storage"), (9, "bus"), (13, "learner")):
            wait_for_step(launcher, run, step)
            part(launcher, name).kill()
        assert launcher.wait(240) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
