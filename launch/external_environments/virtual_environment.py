"""Python environments that hold the packages of others, made once and kept."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bus.errors import ConfigError

MAKE_TIMEOUT_S, INSTALL_TIMEOUT_S = 300.0, 3600.0
SHOWN_LINES = 12
"""Last lines of a program's output that an error shows."""


def variables_of(place: Path) -> dict[str, str]:
    """Return the environment variables by which what packages fetch lies in `place`, beside them."""
    cache = str(place / "cache")
    return {"XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/huggingface", "NLTK_DATA": f"{cache}/nltk_data"}


@dataclass(frozen=True)
class VirtualEnvironment:
    """A Python with packages of its own."""

    place: Path
    packages: tuple[str, ...]
    """What pip installs: packages, directories, URLs and options."""
    base: str = sys.executable
    """Python that it is made from."""

    @property
    def python(self) -> Path:
        """Return its interpreter."""
        return self.place / "venv" / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is whole. Raises `ConfigError` for what cannot be installed."""
        complete = self.place / "installed"
        if complete.exists():
            return
        for directory in ("venv", "cache/nltk_data"):
            (self.place / directory).mkdir(parents=True, exist_ok=True)
        make = [self.base, "-m", "venv", "--clear", "--without-pip", str(self.place / "venv")]
        self.run(make, MAKE_TIMEOUT_S, f"making {self.place / 'venv'}")
        if self.packages:
            own = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            pip = [*own, "--python", str(self.python)]
            install = [*pip, "install", "--quiet", *self.packages]
            self.run(install, INSTALL_TIMEOUT_S, f"installing {' '.join(self.packages)}")
        complete.touch()

    def run(self, command: Sequence[str], timeout_s: float, what: str) -> None:
        """Run a program to its end, which is `what` in words.

        Raises `ConfigError` with its last lines where it fails or takes too long."""
        from bus.process.work_progress import long_work  # not for help

        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        try:
            with long_work(what):
                done = subprocess.run(
                    command, check=False, text=True, timeout=timeout_s,
                    env={**inherited, **variables_of(self.place)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
        except FileNotFoundError as error:
            raise ConfigError(f"{what}: there is no program {command[0]!r}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{what} took longer than {timeout_s:g} s") from error
        if done.returncode:
            last = "\n".join(done.stdout.strip().splitlines()[-SHOWN_LINES:])
            raise ConfigError(f"{what} failed, status {done.returncode}:\n{last}")
