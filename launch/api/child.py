"""The `launch local` that Python started, as a process of its own, with its output in the run's logs."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bus.errors import BusAwayError, ConfigError, LostDataError, SluiceError
from bus.process.child_process import module_command
from bus.process.host_limits import MemoryKills
from launch.process.runtime import LOST_DATA, TEMPORARY, USAGE, last_words
from launch.run_view.recorded_runs import named_holder

POLL_S = 0.05
HOLD_TIMEOUT_S = 600.0
"""Longest time for the checks before a run, which may read millions of prompts, and for its lock."""
ERRORS: Mapping[int, type[SluiceError]] = {
    USAGE: ConfigError,
    LOST_DATA: LostDataError,
    TEMPORARY: BusAwayError,
}
"""Exception that stands for an exit status; `SluiceError` for every other one."""


@dataclass(frozen=True)
class LocalProcess:
    """A running or ended `launch local`."""

    process: subprocess.Popen[bytes]
    output: Path
    begins: int
    """Position in `output` where that of this process begins, in bytes."""
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    """What the kernel has killed for lack of memory since it began."""

    @property
    def runs(self) -> bool:
        """Return whether the process has not ended."""
        return self.process.poll() is None

    def failure(self) -> SluiceError | None:
        """Return the error that the process ended with, in its own words; None if it did not fail."""
        status = self.process.poll()
        if not status:
            return None
        own, last = last_words(self.output, self.begins)
        if own:
            return ERRORS.get(status, SluiceError)(own)
        ending = f"`launch local` ended with {self.memory_kills.ending(status)}"
        return SluiceError(f"{ending}; the end of {self.output}:\n{last}")

    def wait_until_held(self, lock: Path) -> None:
        """Return when the process has checked its settings and holds the run, or has ended.

        Raises `SluiceError` if neither comes in `HOLD_TIMEOUT_S`; the process goes on then."""
        pid, deadline = str(self.process.pid), time.monotonic() + HOLD_TIMEOUT_S
        while self.runs and named_holder(lock) != pid:
            if time.monotonic() > deadline:
                raise SluiceError(
                    f"`launch local`, process {pid}, has not checked its settings and taken {lock} within "
                    f"{HOLD_TIMEOUT_S:g} s: {self.output} says what it is at. It goes on; end it by "
                    f"`kill {pid}`, or take it by launch.attach when it is ready"
                )
            time.sleep(POLL_S)


def start_local(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> LocalProcess:
    """Start `launch local` with its output at the end of a file.

    It outlives this process, and Ctrl-C in a terminal or a notebook does not reach it."""
    with output.open("ab") as file:
        begins = file.tell()  # what the process writes comes after it
        process = subprocess.Popen(
            module_command("launch", "local", *arguments),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True,
        )  # fmt: skip
        return LocalProcess(process, output, begins)
