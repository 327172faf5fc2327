"""The process that starts agents' programs: it forks a watcher for each.

    python bus/process/run_module.py actors.programs.server

Its standard input is a socket of the actor's. Each packet on it carries the descriptors of one program. A
watcher tells on `report` how its program ended, once no process of it is left, and ends it when the actor
closes its end. Loads the standard library and two rooms.
"""

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from actors.programs.confinement import enter
from actors.programs.request import ProgramRequest
from actors.programs.watch import LOOK_S, TERMINATE_S, Outcome, end_children, watch
from actors.sandboxes import kernel
from actors.sandboxes.as_json import from_json
from actors.sandboxes.fork_server import control_socket, ended_before, fork_for_each

SWEEP_S = 5.0
"""Longest time that the kernel may take to end what a program left behind."""


class ProgramDescriptors(NamedTuple):
    """What a request to run a program brings along."""

    request: int
    stdin: int
    output: int
    report: int
    """Socket that tells how the program ended, by which the actor also stops it."""
    group: int
    """File by which the program joins a control group; /dev/null where it has none."""


def main() -> None:
    """Start a program for each packet that comes, until the actor has ended."""
    fork_for_each(control_socket(), 16, len(ProgramDescriptors._fields), _attend)


def _attend(_: bytes, received: list[int]) -> int:
    given = ProgramDescriptors(*received)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with socket.socket(fileno=given.report) as report:
        size = os.fstat(given.request).st_size
        request = from_json(ProgramRequest, os.pread(given.request, size, 0))
        os.close(given.request)
        try:
            Path("/proc/self/oom_score_adj").write_text(kernel.LIKELIEST_TO_BE_KILLED)
            kernel.adopt_orphans()
            listening = enter(request) if request.namespaces else None
            outcome = _run(request, given, report, listening)
        except OSError as error:
            outcome = Outcome(-1, refused=str(error))
        with suppress(OSError):  # the actor may have ended
            report.send(json.dumps(outcome._asdict()).encode())
    return 0


def _run(
    request: ProgramRequest, given: ProgramDescriptors, report: socket.socket, listening: socket.socket | None
) -> Outcome:
    if listening is not None:
        socket.send_fds(report, [b"{}"], [listening.fileno()])
        listening.close()
    told, tells = os.pipe()
    first = os.fork()
    if first == 0:
        report.close()
        os.close(told)
        with suppress(PermissionError):  # before Linux 5.16 another user's process may not join
            os.write(given.group, b"0")
        os.close(given.group)
        with os.fdopen(tells, "w") as answer:
            json.dump(watch(request, given.stdin, given.output)._asdict(), answer)
        os._exit(0)
    for descriptor in (tells, given.stdin, given.output, given.group):
        os.close(descriptor)
    _wait(first, report)
    os.waitpid(first, 0)  # in a namespace of its own, all that the program left ends with it
    end_children(SWEEP_S)  # of a program without namespaces
    with os.fdopen(told) as answer:
        said = answer.read()
    return Outcome(**json.loads(said)) if said else Outcome(-signal.SIGKILL)


def _wait(first: int, report: socket.socket) -> None:
    """Return when a program's first process has ended, which it is told to when the actor hangs up."""
    has_ended, _ = ended_before(first, report, None)
    if not has_ended:
        os.kill(first, signal.SIGTERM)
        has_ended, _ = ended_before(first, None, TERMINATE_S + 2 * LOOK_S)
        if not has_ended:
            os.kill(first, signal.SIGKILL)


if __name__ == "__main__":
    main()
