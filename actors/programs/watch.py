"""The first process of a program's namespace: it starts the program, and ends with it or at its limits."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from actors.programs.confinement import become_program, build_view
from actors.programs.request import ProgramRequest
from actors.sandboxes import kernel

LOOK_S = 0.5
"""Time between two looks at how much a program uses."""
TERMINATE_S = 2.0
"""Time that a program has to end after SIGTERM."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CANNOT_START = 127


class Outcome(NamedTuple):
    """How a program ended."""

    status: int
    """Exit status; negative for the signal that ended it."""
    over: str = ""
    refused: str = ""
    """Why the program could not be started."""


class Process(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    parent: int
    threads: int
    memory_bytes: int


def watch(request: ProgramRequest, stdin: int, output: int) -> Outcome:
    """Run the program, and return when it has ended, SIGTERM has come and its time is over, or it uses too
    much. What it has left behind ends with this process's namespace, or is swept by its parent."""
    kernel.die_with_parent()
    try:
        if request.namespaces:
            build_view(request)
        kernel.set_dumpable(False)  # the program could otherwise trace this process
    except OSError as error:
        return Outcome(-1, refused=str(error))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    failed, fails = os.pipe()
    child = os.fork()
    if child == 0:
        _run(request, stdin, output, fails)
    for descriptor in (fails, stdin, output):
        os.close(descriptor)
    with os.fdopen(failed) as said:
        if reason := said.read():  # the pipe ends when the program's command runs
            return Outcome(-1, refused=reason)
    return _watch(request, child)


def _run(request: ProgramRequest, stdin: int, output: int, fails: int) -> None:
    try:
        become_program(request, stdin, output)
        os.closerange(3, fails)
        os.closerange(fails + 1, 1 << 16)
        os.execvpe(request.command[0], request.command, request.variables)
    except OSError as error:
        os.write(fails, (error.strerror or str(error)).encode())
    finally:
        os._exit(CANNOT_START)


def _watch(request: ProgramRequest, child: int) -> Outcome:
    until = None
    while True:
        came = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, LOOK_S)
        if (status := _status_of(child)) is not None:
            return Outcome(status)
        if came is not None and came.si_signo == signal.SIGTERM and until is None:
            until = time.monotonic() + TERMINATE_S
            signal_all(below(os.getpid()), signal.SIGTERM)
        if until is not None and time.monotonic() > until:
            return Outcome(-signal.SIGKILL)
        if came is None and (over := _over(request)):
            return Outcome(-signal.SIGKILL, over=over)


def _status_of(child: int) -> int | None:
    """Reap all that has ended; return the program's own exit status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def _over(request: ProgramRequest) -> str:
    """Return which limit of all its processes together a program has passed."""
    processes = below(os.getpid())
    threads = sum(one.threads for one in processes)
    memory = sum(one.memory_bytes for one in processes)
    if threads > request.processes:
        return f"it had {threads} processes and threads, and may have {request.processes}"
    if memory > request.memory_bytes:
        return f"it took {memory >> 20} MiB of memory, and may take {request.memory_bytes >> 20}"
    return ""


def signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    for one in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, number)


def end_children(within_s: float) -> None:
    """End all that this process has adopted of what a program or command left behind, in whatever session it
    is."""
    until = time.monotonic() + within_s
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            signal_all(below(os.getpid()), signal.SIGKILL)
            time.sleep(0.001)


def below(pid: int) -> list[Process]:
    """Return the descendants of a process."""
    children: dict[int, list[Process]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and (process := _process(path)) is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        those = children.get(waiting.pop(), [])
        found += those
        waiting += [one.pid for one in those]
    return found


def _process(path: Path) -> Process | None:
    try:
        fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the process has ended
        return None
    return Process(
        pid=int(path.name),
        parent=int(fields[1]),
        threads=int(fields[17]),
        memory_bytes=int(fields[21]) * PAGE_BYTES,
    )
