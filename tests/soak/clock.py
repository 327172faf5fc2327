"""A wall clock that can be moved for the processes of one run, by a small library that is preloaded."""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class ShiftedClock:
    """The clock of the processes that have `variables`. The bus's server is no C program: it is not moved."""

    def __init__(self, directory: Path) -> None:
        """Compile the library; where no C compiler is, there are no variables."""
        self._shift = directory / "clock.shift"
        self._library = directory / "clock.so"
        compiler = shutil.which("cc")
        if compiler is not None:
            self.move(0)
            command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)]
            subprocess.run(command, check=True, timeout=60)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of a process with this clock; none where it cannot be had."""
        if not self._library.exists():
            return {}
        return {
            "LD_PRELOAD": str(self._library.absolute()),
            "SLUICE_CLOCK_SHIFT": str(self._shift.absolute()),
        }

    def move(self, seconds: int) -> None:
        """Set by how much the clock is wrong, in processes that run too."""
        self._shift.touch()
        with self._shift.open("r+b") as file:  # in place: processes have it mapped
            file.write(struct.pack("=q", seconds))
