"""Child processes that do not outlive their parent."""

import ctypes
import ctypes.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
RUN_MODULE = str(Path(__file__).with_name("run_module.py"))
"""The file by which one of Sluice's modules is started."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs one of Sluice's modules in a process of its own.

    A user's own files of the same names, such as `launch.py`, are not taken for them, wherever they lie.
    """
    return sys.executable, "-P", RUN_MODULE, module, *arguments


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """Make the kernel send this child a signal when its parent dies. Use the result as `preexec_fn`."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(ctypes.util.find_library("c"))  # loaded before the fork

    def ask_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask_kernel
