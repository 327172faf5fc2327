"""Starts `launch` commands as a user on several hosts would: own working directories, own processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

SMALL = (
    "--preset", "sort", "--warmup.steps", "4", "--warmup.threads", "1", "--learner.steps", "4",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "2", "--learner.checkpoint.save-every", "2",
    "--learner.target-accuracy", "1.0",
)  # fmt: skip
"""The sort preset, small enough for a test."""


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
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> int:
        """Its exit status; fails with what it said if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args} still runs:\n{self.said()}") from None

    def stop(self, timeout_s: float = 30.0) -> int:
        """End it as Ctrl-C would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End it and all its children at once, whatever state it is in."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def said(self) -> str:
        """Everything it printed so far."""
        return self.output.read_text(errors="replace")
