"""`launch status` on a live run: whole, and with its storage or its learner stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, LONG, Command, part, wait_for_step, with_steps

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
RUN = "looked-at"
LONGEST_S = 3.0
"""Time that the questions may take. The start of Python comes on top, which other processes slow down."""


def look(root: Path, *flags: str) -> tuple[int, str]:
    """Return what `launch status` says in the run's root, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", "status", "--run", RUN, *flags],
        cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return done.returncode, done.stdout or done.stderr


def test_status_tells_a_whole_run_from_one_whose_parts_are_stopped(tmp_path: Path):
    launcher = Command(tmp_path, "local", "--run", RUN, *with_steps(LONG, 2000))
    try:
        wait_for_step(launcher, tmp_path / "runs" / RUN, 3)
        status, said = look(tmp_path, "--json")
        found = json.loads(said)
        # with so few demonstrations all rewards may be 0, which is an alarm
        missing = [problem for problem in found["problems"] if ": ALARM: " not in problem]
        assert (status, missing) == (int(not found["healthy"]), [])
        assert {member["role"] for member in found["members"]} == {"storage", "learner", "actor"}
        assert all(member["since_s"] < time.time() and member["host"] for member in found["members"])
        assert found["versions"]["trained_step"] >= 3
        assert found["versions"]["oldest_in_use"] <= found["versions"]["published"]
        assert found["rates"]["steps_per_minute"] > 0
        assert set(found["streams"]) >= {"TASKS", "TRAJECTORIES", "WEIGHTS"}

        for name, role in (("storage", "dispatcher"), ("learner", "learner")):
            process = part(launcher, name)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                status, said = look(tmp_path)
                took_s = time.monotonic() - began
                assert status == 1, said
                silent = f"{name} was not heard within 1.3 s: process {process.pid} on"
                assert silent in " ".join(said.split()), said
                assert f"{role} silent since" in " ".join(said.split()), said
                assert max(map(len, said.splitlines())) <= 80
                assert took_s < 2 * LONGEST_S
            finally:
                os.kill(process.pid, signal.SIGCONT)
    finally:
        launcher.stop(120)
        launcher.kill()
    status, said = look(tmp_path)
    assert (status, "does not go on (it is stopped)" in said) == (2, True), said
