"""Why a learner waits, in a real run: a slow engine, a slow reward and a full disk, one after another."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.dashboard.status_watch import StatusWatch
from launch.settings.run_config import validate
from soak.disk import fill, small_disk
from tests.e2e.commands import ENVIRONMENT, Command, wait_for_step, wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(900)]
RUN = "staged"
REWARD = '''
import asyncio
from pathlib import Path

async def digits(answer):
    """The share of digits, late as long as a file says so."""
    while Path("slow").exists():
        await asyncio.sleep(0.2)
    return sum(c.isdigit() for c in answer.text) / max(1, len(answer.text))
'''
SETTINGS = (
    "--preset", "sort", "--reward", "staged:digits", "--warmup.steps", "0", "--learner.steps", "5000",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "8",
    "--evaluation.every-versions", "0", "--learner.checkpoint.save-every", "1",
    "--learner.target-accuracy", "1.0", "--sampling.max-new-tokens", "40",
    "--actors.engine.slots", "1", "--actors.groups-at-once", "8",
    *(f for name in ("weights", "trajectories", "files") for f in (f"--bus.streams.{name}-mib", "64")),
)  # fmt: skip
"""An engine that runs one request at a time is slow: the learner waits for it from the start."""
LOOK_S = 5.0
"""Longest time that a look may take after which the cause is known; a start of Python comes on top."""


def status(root: Path) -> str:
    """What `launch status` says, in one line."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", "status", "--run", RUN, "--directory", "disk"],
        cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return " ".join(done.stdout.split())


async def overview(root: Path) -> str:
    """What the dashboard's page of the run is given, asked once."""
    found = json.loads((root / "disk" / RUN / "config.json").read_text())
    where = validate({**found, "directory": root / "disk"})
    watch = StatusWatch(RUN, lambda _: where)
    watch.look()
    async with asyncio.timeout(LOOK_S):
        while not watch.revision:  # noqa: ASYNC110 - a page polls it too
            await asyncio.sleep(0.05)
    return json.dumps(watch.payload())


def assert_said(launcher: Command, root: Path, words: str) -> None:
    """Assert that the terminal, the dashboard and `launch status` say these words while the learner waits.

    Between two waits it trains a step, so that one look may come at a wrong moment."""
    seen = len(launcher.said())
    wait_until(lambda: words in launcher.said()[seen:], f"{words!r} in the terminal", launcher)
    wait_until(lambda: words in asyncio.run(overview(root)), f"{words!r} on the page", launcher)
    wait_until(lambda: words in status(root), f"{words!r} by launch status", launcher)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("a file system that may be filled needs root and loop devices")
        yield tmp_path / "disk"


def test_every_screen_names_what_a_learner_waits_for(tmp_path: Path, disk: Path):
    (tmp_path / "staged.py").write_text(REWARD)
    slow, run = tmp_path / "slow", disk / RUN
    launcher = Command(tmp_path, "local", "--run", RUN, "--directory", "disk", *SETTINGS)
    try:
        wait_for_step(launcher, run, 1, timeout_s=300)
        assert_said(launcher, tmp_path, "engines run 1 request and ")
        slow.touch()
        assert_said(launcher, tmp_path, " rewards run, the longest for ")
        slow.unlink()
        ballast = fill(disk)
        assert_said(launcher, tmp_path, "is full: 0 of ")
        trained = json.loads((run / "progress.json").read_text())["step"]
        ballast.unlink()
        wait_for_step(launcher, run, trained + 3, timeout_s=300)
        wait_until(lambda: "no answer from" not in status(tmp_path), "all processes", launcher)
    finally:
        launcher.stop(120)
        launcher.kill()
