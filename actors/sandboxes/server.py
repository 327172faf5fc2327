"""The process that starts programs: it enters the sandbox once and forks for each program.

    python bus/process/run_module.py actors.sandboxes.server LIMITS

Its standard input is a socket of the actor's. Each packet on it carries the descriptors of one program and,
as JSON, its own limits in place of those of LIMITS. Loads the standard library and this room.
"""

import builtins
import importlib
import json
import linecache
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from actors.sandboxes import kernel
from actors.sandboxes.as_json import from_json
from actors.sandboxes.fork_server import control_socket, ended_before, fork_for_each
from actors.sandboxes.jail import Host, enter, private_namespaces, python_directories
from actors.sandboxes.kernel import LIKELIEST_TO_BE_KILLED
from actors.sandboxes.limits import Limits
from actors.sandboxes.system_calls import filter_program, install_filter

NAME = "program.py"
ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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
        exec(compile(source, NAME, "exec", dont_inherit=True), main)  # what the sandbox is for
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
    except (OSError, ValueError, KeyboardInterrupt):  # the program or the reader closed the streams
        return FAILED
    return status


LARGEST_PACKET = 4096
BEGUN = b"1"
PEER = 3
"""Descriptor of the socket to another program."""
MOST_DESCRIPTORS = 1 << 16
FLAGS = 5
"""Place of a process's flags among the numbers that follow its state in `stat`."""
PF_EXITING = 0x4


class Descriptors(NamedTuple):
    """What a request to run a program brings along."""

    code: int
    stdin: int
    stdout: int
    stderr: int
    report: int
    """Socket that tells how the program ended, by which the actor also stops it."""
    peer: int | None = None
    """Socket to another program, where it has one."""

    def close(self) -> None:
        for descriptor in (self.code, self.stdin, self.stdout, self.stderr, self.peer):
            if descriptor is not None:
                os.close(descriptor)


def main() -> None:
    """Enter the sandbox, say whether that worked, and start a program for each packet that comes."""
    limits = from_json(Limits, sys.argv[1])
    control, host = control_socket(), Host()
    try:
        for name in limits.preload:
            importlib.import_module(name)
    except ImportError as error:
        control.send(json.dumps({"missing": str(error)}).encode())
        return
    try:
        directories = python_directories(limits.package_directories)
        enter(directories, lambda root: Path(f"{root}{limits.home}").mkdir(exist_ok=True), host)
    except OSError as error:
        control.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(json.dumps({"ready": os.getpid()}).encode())

    def supervise(packet: bytes, received: list[int]) -> int:
        return _supervise(Descriptors(*received), replace(limits, **json.loads(packet)), host)

    fork_for_each(control, LARGEST_PACKET, len(Descriptors._fields), supervise)


def _supervise(given: Descriptors, limits: Limits, host: Host) -> int:
    """Run one program, see to its end, and report it. This process stays outside the program's reach."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=given.report) as report:
        try:
            outcome = _run(given, limits, host, report)
        except OSError as error:
            outcome = {"broken": f"{type(error).__name__}: {error}"}
        try:
            report.send(json.dumps(outcome).encode())
        except OSError:
            return 1  # the actor no longer wants to know
    return 0


def _run(given: Descriptors, limits: Limits, host: Host, report: socket.socket) -> dict[str, object]:
    source = _read_all(given.code)
    private_namespaces(host, limits.home, file_bytes=limits.file_bytes, files=limits.files)
    host.write("oom_score_adj", LIKELIEST_TO_BE_KILLED)
    begun, begins = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(begun)
        _be_the_program(given, limits, source, begins)
    os.close(begins)
    given.close()
    stopped = _wait(child, report, limits.wall_s, host)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # a program may have lowered its limit, which nobody can ask once it is gone
    _, cpu_s = resource.prlimit(child, resource.RLIMIT_CPU)
    _, status, usage = os.wait4(child, 0)
    took_s = time.monotonic() - started
    if os.read(begun, 1) != BEGUN and stopped != "stopped":  # what is no longer wanted need not have begun
        return {"broken": "the program's process ended before the program began"}
    return {
        "end": stopped or _end_of(status, usage, cpu_s),
        "status": os.waitstatus_to_exitcode(status),
        "took_s": took_s,
    }


def _read_all(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode("utf-8", "surrogatepass")


def _wait(child: int, report: socket.socket, wall_s: float, host: Host) -> str | None:
    """Wait for the program; kill it, with all it started, after `wall_s` or when the actor hangs up. Returns
    why it was killed, None if it was ending before."""
    has_ended, hung_up = ended_before(child, report, wall_s)
    if has_ended:
        return None
    # the actor hangs up when the program's peer has ended, which sees its socket close before it is gone
    is_ending = _is_ending(host.read(f"{child}/stat"))
    is_over = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    os.kill(child, signal.SIGKILL)
    if is_ending or is_over:
        return None
    return "stopped" if hung_up else "time"


def _is_ending(stat: str) -> bool:
    """Whether a process was on its way out, whatever ended it, when the kernel wrote its `stat` (proc(5)). A
    zombie whose process is not over has threads that run on: its main thread alone has ended."""
    state, *numbers = stat.rpartition(")")[2].split()
    return bool(int(numbers[FLAGS]) & PF_EXITING) and state != "Z"


def _end_of(status: int, usage: resource.struct_rusage, cpu_s: int) -> str:
    """Return how a program ended that was not killed from here, and had so much processor time."""
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        return "exited"
    # inside nothing can kill the namespace's first process: it was the limit, or the host
    return "cpu" if usage.ru_utime + usage.ru_stime >= cpu_s - 0.5 else "killed"


def _be_the_program(given: Descriptors, limits: Limits, source: str, begins: int) -> None:
    status = 1
    try:
        become_program(limits, given.stdin, given.stdout, given.stderr)
        os.write(begins, BEGUN)  # fails if the watcher died before its death would end this process
        if given.peer is not None:
            os.dup2(given.peer, PEER)
        os.closerange(PEER if given.peer is None else PEER + 1, MOST_DESCRIPTORS)
        status = run_code(source, limits.package_directories)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
