"""The process that starts sandboxes in namespaces of this host, and what runs inside of them.

    python bus/process/run_module.py actors.episode_sandboxes.guest SETTINGS

Its standard input is a socket of the actor's. Each packet on it carries the socket of one sandbox, and a
file by which the sandbox joins a control group, where the actor has one. The first process of a sandbox
lives until the actor closes that socket, and forks for each command. Whatever happens to the actor, the
kernel ends a sandbox with its first process. Loads the standard library and three rooms.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from actors.episode_sandboxes.guest_request import CommandRequest, GuestLimits, GuestSettings
from actors.programs.watch import below, end_children, signal_all
from actors.sandboxes import kernel
from actors.sandboxes.as_json import from_json
from actors.sandboxes.fork_server import control_socket, ended_before, fork_for_each
from actors.sandboxes.jail import DEVICE_LINKS, INSIDE, Host, enter, make_place, outermost, own_namespaces
from actors.sandboxes.system_calls import NEEDED_BY_COMMANDS, filter_program, install_filter

LOOK_S = 0.5
"""Time between two looks at how much a sandbox uses."""
SWEEP_S = 2.0
"""Longest time for which what a command has started is ended, one process after the other."""
PROGRAMS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/etc/alternatives", "/etc/ssl", "/etc/pki",
    "/etc/ca-certificates", "/etc/fonts", "/etc/java", "/etc/profile.d",
)  # fmt: skip
"""Directories of the host that hold programs and what they need."""
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
TEXTS = {
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/passwd": f"sandbox:x:{INSIDE}:{INSIDE}::/workspace:/bin/sh\n",
    "/etc/group": f"sandbox:x:{INSIDE}:\n",
}
OVER = signal.SIGUSR1
"""Tells who waits for a command that the sandbox has passed its limit of memory."""
CANNOT_START = 127
BEHIND_THE_ACTOR = 10
MOST_DESCRIPTORS = 1 << 16
BACKLOG = 1024
LARGEST_PACKET = 4096
LARGEST_COPY = 1 << 20


class CommandDescriptors(NamedTuple):
    """What a request to carry out a command brings along."""

    request: int
    stdin: int
    stdout: int
    stderr: int
    report: int
    """Socket that tells how the command ended, by which the actor also stops it."""


def main() -> None:
    """Show the host's programs read-only, and start a sandbox for each packet that comes."""
    settings = from_json(GuestSettings, sys.argv[1])
    control, host = control_socket(), Host()
    try:
        enter(_shown(settings), partial(_furnish, settings.links), host, processes=True)
        _cover(settings.hidden)
        socket.sethostname("sandbox")
    except OSError as error:
        control.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        return
    control.send(json.dumps({"ready": os.getpid()}).encode())

    def hold(packet: bytes, received: list[int]) -> int:
        limits = GuestLimits(**json.loads(packet))
        return _hold(socket.socket(fileno=received[0]), received[1:], settings, limits, host)

    fork_for_each(control, LARGEST_PACKET, 2, hold)


def _shown(settings: GuestSettings) -> list[str]:
    """Return what is seen of the host: its programs, this Python, and what the settings name."""
    files = [path for path in settings.shown if Path(path).is_file()]
    return [*outermost((*PROGRAMS, sys.prefix, sys.base_prefix, *settings.shown)), *files]


def _cover(paths: tuple[str, ...]) -> None:
    """Put nothing in the place of files of the host, such as labels and records of runs."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY
    for path in paths:
        if Path(path).is_dir():
            kernel.mount("hidden", path, "tmpfs", flags, "size=4k,nr_inodes=1,mode=000")
        elif Path(path).exists():
            kernel.attach(kernel.read_only_copy("/dev/null", devices=True), path)


def _furnish(links: Mapping[str, str], root: Path) -> None:
    """Make the directories and small files that a sandbox has besides those of the host."""
    for path in (*WRITABLE, "/dev/pts"):
        Path(f"{root}{path}").mkdir(parents=True, exist_ok=True)
    for path, text in TEXTS.items():
        Path(f"{root}{path}").parent.mkdir(exist_ok=True)
        Path(f"{root}{path}").write_text(text)
    for name, target in {
        **links,
        **{f"/dev/{name}": target for name, target in DEVICE_LINKS.items()},
    }.items():
        Path(f"{root}{name}").symlink_to(target)


def _hold(
    actor: socket.socket, group: Sequence[int], settings: GuestSettings, limits: GuestLimits, host: Host
) -> int:
    """Keep the socket of a sandbox open until nothing of it is left."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        own_namespaces(host, kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC)
        host.write("oom_score_adj", kernel.LIKELIEST_TO_BE_KILLED)
        kernel.die_with_parent()
    except OSError as error:
        actor.send(json.dumps({"refused": str(error)}).encode())
        return 1
    first = os.fork()
    if first == 0:
        os._exit(_be_first(actor, group, settings, limits))
    os.waitpid(first, 0)
    return 0


def _be_first(
    actor: socket.socket, group: Sequence[int], settings: GuestSettings, limits: GuestLimits
) -> int:
    """Be the first process of a sandbox: carry out what the actor asks for, until it hangs up."""
    try:
        kernel.die_with_parent()
        _join(group)
        _mount(settings, limits.disk_bytes)
        kernel.bring_loopback_up()
        kernel.set_dumpable(False)  # commands could otherwise trace this process
    except OSError as error:
        actor.send(json.dumps({"refused": str(error)}).encode())
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a child that nobody waits for is gone when it ends
    signal.signal(OVER, signal.SIG_IGN)
    actor.send(b'{"ready": 1}')
    handlers: set[int] = set()
    poll, next_look_s = select.poll(), 0.0
    poll.register(actor, select.POLLIN)
    while True:
        if time.monotonic() >= next_look_s:  # however often commands come
            handlers = _limit_memory(handlers, limits.memory_bytes)
            next_look_s = time.monotonic() + LOOK_S
        if poll.poll(LOOK_S * 1000):
            packet, received, _, _ = socket.recv_fds(actor, 16, len(CommandDescriptors._fields))
            if not packet:
                return 0
            if not received:
                _listen(actor, int(packet))
                continue
            given = CommandDescriptors(*received)
            if (handler := os.fork()) == 0:
                actor.close()
                os._exit(_handle(given, settings, limits))
            handlers.add(handler)
            for descriptor in given:
                os.close(descriptor)


def _join(group: Sequence[int]) -> None:
    """Join a control group that bounds processors, or let the actor go first where there is none."""
    for joining in group:
        os.write(joining, b"0")
        os.close(joining)
    if not group:
        os.nice(BEHIND_THE_ACTOR)


def _listen(actor: socket.socket, port: int) -> None:
    try:
        with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as listening:
            socket.send_fds(actor, [b"{}"], [listening.fileno()])
    except OSError as error:
        actor.send(json.dumps({"refused": str(error)}).encode())


def _mount(settings: GuestSettings, size: int) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    hidden = [path for path in _shown(settings) if path.startswith(tuple(f"{one}/" for one in WRITABLE))]
    trees = {path: (kernel.read_only_copy(path), Path(path).is_dir()) for path in hidden}
    for path in WRITABLE:
        kernel.mount("sandbox", path, "tmpfs", flags, f"size={size},nr_inodes={size // 4096 + 64},mode=1777")
    for target in settings.links.values():
        Path(target).mkdir(parents=True, exist_ok=True)
    for path, (tree, is_directory) in trees.items():
        make_place(Path(path), is_directory=is_directory)
        kernel.attach(tree, path)
    kernel.mount("sandbox", "/dev/pts", "devpts", flags | kernel.MS_NOEXEC, "newinstance,ptmxmode=0666")
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)


def _limit_memory(handlers: set[int], most_bytes: int) -> set[int]:
    """End all commands of a sandbox that takes too much. Returns the handlers that still wait."""
    processes = below(os.getpid())
    waiting = handlers & {one.pid for one in processes}
    commands = [one for one in processes if one.pid not in waiting]
    signal_all([one for one in processes if one.pid in waiting], signal.SIGCONT)  # a command may stop them
    if sum(one.memory_bytes for one in commands) > most_bytes:
        signal_all([one for one in processes if one.pid in waiting], OVER)
        signal_all(commands, signal.SIGKILL)
    return waiting


def _handle(given: CommandDescriptors, settings: GuestSettings, limits: GuestLimits) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    passed: list[int] = []
    signal.signal(OVER, lambda number, _: passed.append(number))
    with socket.socket(fileno=given.report) as report:
        request = from_json(CommandRequest, os.pread(given.request, os.fstat(given.request).st_size, 0))
        kernel.adopt_orphans()  # so that what a command has started is found when its time is over
        started = time.monotonic()
        given = given._replace(stdin=_piped(given.stdin))
        child = os.fork()
        if child == 0:
            _become(given, request, settings.variables, limits)
        for descriptor in given[:-1]:
            os.close(descriptor)
        stopped = _wait(child, report, request.timeout_s)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if stopped:
            end_children(SWEEP_S)
        end = "memory" if passed else "time" if stopped else "exited"
        outcome = {"end": end, "status": status, "took_s": time.monotonic() - started}
        with suppress(OSError):  # the actor may no longer want to know
            report.send(json.dumps(outcome).encode())
    return 0


def _piped(file: int) -> int:
    """Return a pipe that brings what a file holds, if that is anything. By /proc a command's children could
    read the file again, with a line that only the command may know; they cannot look into the process that
    fills the pipe."""
    if not os.fstat(file).st_size:
        return file
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(reading)
        with suppress(OSError):  # nobody reads on
            while os.sendfile(writing, file, None, LARGEST_COPY):
                pass
        os._exit(0)
    os.close(file)
    os.close(writing)
    return reading


def _wait(child: int, report: socket.socket, timeout_s: float) -> bool:
    """Wait for a command; end it after its time, or when the actor hangs up. Returns whether it was ended."""
    has_ended, _ = ended_before(child, report, timeout_s)
    if has_ended:
        return False
    signal_all(below(os.getpid()), signal.SIGKILL)
    return True


def _become(
    given: CommandDescriptors, request: CommandRequest, variables: Mapping[str, str], limits: GuestLimits
) -> None:
    """Turn this process into that of a command: its own session, limits, no privileges."""
    try:
        os.setsid()
        for place, descriptor in enumerate((given.stdin, given.stdout, given.stderr)):
            os.dup2(descriptor, place)
        os.closerange(3, MOST_DESCRIPTORS)
        for number in (signal.SIGINT, signal.SIGPIPE, OVER):
            signal.signal(number, signal.SIG_DFL)
        _limit(limits)
        kernel.drop_capabilities()
        install_filter(filter_program(os.uname().machine, NEEDED_BY_COMMANDS))
        os.chdir(request.directory)
        os.execvpe(request.words[0], request.words, {**variables, **request.variables})
    except (OSError, ValueError) as error:  # a word may hold a zero
        os.write(2, f"{request.words[0]}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(CANNOT_START)


def _limit(limits: GuestLimits) -> None:
    kernel.limit_resources(
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    )


if __name__ == "__main__":
    main()
