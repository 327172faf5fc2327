"""Child processes that do not outlive their parent."""

import asyncio
import ctypes
import ctypes.util
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
RUN_MODULE = str(Path(__file__).with_name("run_module.py"))
"""The file by which one of Sluice's modules is started."""


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs one of Sluice's modules in a process of its own. A user's own files of the
    same names, such as `launch.py`, are not taken for them, wherever they lie."""
    return sys.executable, "-P", RUN_MODULE, module, *arguments


class Told(NamedTuple):
    """What a process wrote, and the status that it ended with."""

    answer: bytes
    errors: str
    status: int


async def ask_child(
    command: Sequence[str], asked: bytes = b"", *, limit_s: float, env: Mapping[str, str] | None = None
) -> Told:
    """Return what a process tells that is given `asked` on its standard input, and ends by itself. Raises
    TimeoutError where it does not do so in time, and OSError where it cannot be started."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
    try:
        async with asyncio.timeout(limit_s):
            answer, errors = await child.communicate(asked)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return Told(answer, errors.decode(errors="replace"), child.returncode or 0)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """Make the kernel send this child a signal when its parent dies. Use the result as `preexec_fn`."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(ctypes.util.find_library("c"))  # loaded before the fork

    def ask_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask_kernel


class Tied(NamedTuple):
    """Says how to start a process that does not outlive its parent."""

    command: tuple[str, ...]
    preexec_fn: Callable[[], None] | None


def tied_to_parent(
    command: Sequence[str], number: signal.Signals = signal.SIGTERM, *, path: str | None = None
) -> Tied:
    """Return how to start `command` so that the kernel sends it a signal when its parent dies.

    Where it can, setpriv of util-linux asks the kernel for that: with a function to call before the program,
    Python has the kernel copy the page tables of its whole process, which takes 60 ms of CPU where torch is
    loaded instead of 2. `path` is the PATH of the new process, if that is another one."""
    if shutil.which(command[0], path=path) is None:  # the start fails, and says why
        return Tied(tuple(command), None)
    if (setpriv := _setpriv()) is None:
        return Tied(tuple(command), die_with_parent(number))
    return Tied((setpriv, "--pdeathsig", number.name.removeprefix("SIG"), "--", *command), None)


@cache
def _setpriv() -> str | None:
    """Return where setpriv is, if it knows of signals at the death of a parent."""
    if (found := shutil.which("setpriv")) is None:
        return None
    command = [found, "--pdeathsig", "TERM", "--", found, "--version"]
    try:
        tried = subprocess.run(command, check=False, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # the command fails here, or hangs: there is another way
        return None
    return found if tried.returncode == 0 else None
