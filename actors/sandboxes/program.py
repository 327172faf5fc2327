"""One program's own process: it gives up everything it does not need, then runs the code."""

import builtins
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
from types import TracebackType

from actors.sandboxes import kernel
from actors.sandboxes.limits import Limits
from actors.sandboxes.system_calls import filter_program, install_filter

NAME = "program.py"
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PATH": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
FAILED = 1


def become_program(limits: Limits, stdin: int, stdout: int, stderr: int) -> None:
    """Turn this process into that of a program: its own session, limits, no privileges, few system calls.

    Raises OSError for what the kernel does not allow; then no code may run."""
    os.setsid()  # kill(0) reaches all of a process group, in whatever namespace they are
    kernel.die_with_parent()
    for place, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, place)
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(limits.home)
    _limit(limits)
    kernel.drop_capabilities()
    install_filter(filter_program(os.uname().machine))
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=limits.home, TMPDIR=limits.home)


def _limit(limits: Limits) -> None:
    kernel.limit_resources(
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NPROC, limits.processes + 1),  # the process that watches this one counts too
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
    )


def run_code(source: str, packages: tuple[str, ...]) -> int:
    """Run Python code as the main module and return the exit status; what it prints goes to its streams."""
    _forget_the_host(packages)
    main = {"__name__": "__main__", "__builtins__": builtins, "__file__": NAME}
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), main)  # this is what the sandbox is for
        status = 0
    except SystemExit as asked:
        status = _status_of(asked)
    # a program may raise anything: it is told like Python's own interpreter tells it
    except BaseException as error:  # noqa: BLE001
        _tell(error)
        status = FAILED
    return _finished(status)


def _forget_the_host(packages: tuple[str, ...]) -> None:
    """Take this room's own modules and paths out of what the program can import."""
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("actors", "bus", "sluice_own_packages")
    ]:
        del sys.modules[name]
    standard = [path for path in sys.path if path.startswith(sys.base_prefix) and "-packages" not in path]
    sys.path[:] = [*standard, *packages]
    sys.argv[:] = [NAME]
    sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]


def _status_of(asked: SystemExit) -> int:
    if asked.code is None:
        return 0
    if isinstance(asked.code, int):
        return asked.code & 0xFF
    print(asked.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    return FAILED


def _tell(error: BaseException) -> None:
    """Print the traceback, from the program's own first line on."""
    at: TracebackType | None = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != NAME:
        at = at.tb_next
    traceback.print_exception(type(error), error, at)


def _finished(status: int) -> int:
    """Wait for threads that the program left running, and write out what it printed."""
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, KeyboardInterrupt):  # its streams are closed, by itself or by the reader
        return FAILED
    return status
