"""Starts `launch` commands as a user on several hosts would: own working directories, own processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from soak.local_run import launch_command

SMALL = (
    "--preset", "sort", "--warmup.steps", "4", "--warmup.threads", "1", "--learner.steps", "4",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "2", "--learner.checkpoint.save-every", "2",
    "--learner.target-accuracy", "1.0",
)  # fmt: skip
"""The sort preset, small enough for a test."""

STEPS, GROUPS, SAMPLES = 16, 4, 4
LONG = (
    "--preset", "sort", "--warmup.steps", "2", "--learner.steps", str(STEPS),
    "--admission.groups-per-step", str(GROUPS), "--admission.samples-per-prompt", str(SAMPLES),
    "--learner.checkpoint.save-every", "4", "--evaluation.every-versions", "0",
    "--learner.target-accuracy", "1.0",
)  # fmt: skip
"""The sort preset, long enough for parts of it to be killed on the way."""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
"""Variables of a command that runs elsewhere than beside Sluice's packages."""


def with_steps(settings: tuple[str, ...], steps: int) -> tuple[str, ...]:
    """Return the settings with another number of steps."""
    value = settings.index("--learner.steps") + 1
    return (*settings[:value], str(steps), *settings[value + 1 :])


class Command:
    """A running `launch` command; its output lies in `<directory>/<name>.out`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.output = directory / f"{arguments[0]}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launch", *arguments],
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int:
        """Its exit status; fails with what it said if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} still runs:\n{self.said()}") from None

    def stop(self, timeout_s: float = 60.0) -> int:
        """End it as Ctrl-C would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End it and all below it at once, whatever state it is in.

        Parts of a run have sessions of their own: they would take half a minute of the next tests' processors
        to end in order."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def said(self) -> str:
        """Everything it printed so far."""
        return self.output.read_text(errors="replace")


def records_of_run(root: Path, *arguments: str, within_s: float = 240) -> list[dict[str, Any]]:
    """Run the sort preset in `root` to its end, four steps of four groups of four answers.

    Returns the records of its metrics."""
    run = Command(root, "local", *arguments)
    try:
        assert run.wait(within_s) == 0, run.said()
    finally:
        run.kill()
    directory = root / "runs/sort"
    assert_whole(directory, 4, 4, 4)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition: Callable[[], bool], what: str, *alive: Command, timeout_s: float = 200.0) -> None:
    """Return once the condition holds; fails if a command of `alive` ends before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        said = "\n".join(command.said() for command in alive)
        assert all(command.process.poll() is None for command in alive), f"ended before {what}:\n{said}"
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for {what}:\n{said}"
        time.sleep(0.05)


def part(launcher: Command, name: str) -> psutil.Process:
    """The running process of one part, once it is there."""
    found: list[psutil.Process] = []

    def runs() -> bool:
        for child in psutil.Process(launcher.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if launch_command(child.cmdline()) == name:
                    found.append(child)
        return bool(found)

    wait_until(runs, f"a process of {name}", launcher)
    return found[0]


def wait_for_step(launcher: Command, run: Path, step: int, *, timeout_s: float = 250.0) -> None:
    """Return once a step was trained."""
    metrics = run / "metrics.jsonl"

    def trained() -> bool:
        records = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        return any(r.get("train/stage") == "rl" and r["step"] >= step for r in records)

    wait_until(trained, f"step {step}", launcher, timeout_s=timeout_s)


def assert_whole(run: Path, steps: int, groups: int, samples: int) -> None:
    """Assert what the summary of a finished run says: each step had its groups, each group its samples, in
    time."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["trajectories_trained"] == steps * groups * samples
    assert summary["groups"]["trained"] == steps * groups
    assert summary["accounted"]
    assert summary["max_staleness_seen"] <= summary["max_staleness_allowed"]


def trained_again(directory: Path) -> dict[str, object]:
    """Return what `launch retrain` reports of the run, by one process."""
    retrained = Command(directory, "retrain", "--run", "sort", "--json")
    try:
        assert retrained.wait(300) == 0, retrained.said()
    finally:
        retrained.kill()
    return json.loads(retrained.said().splitlines()[-1])
