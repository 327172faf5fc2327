"""What a program sees: its own processes, its own loopback, and the host's files read-only. `enter` is called
by the process that watches over a program, `build_view` by the first process of the program's namespace, and
`become_program` by the program's own process before its command runs."""

import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from actors.programs.request import ProgramRequest
from actors.sandboxes import kernel
from actors.sandboxes.jail import DEVICE_LINKS, make_place
from actors.sandboxes.system_calls import install_filter, without_keys

PRIVATE = ("/tmp", "/dev/shm")
"""Directories in whose place a program has empty ones of its own that it may write."""
COVER_BYTES = 1 << 20
"""Size of the empty directories in the place of those that are covered, which a program may fill."""
DEVICES = ("full", "null", "random", "tty", "urandom", "zero", "dri", "kfd", "nvidia*")
"""Devices of /dev that a program finds, GPUs included. A disk would show all files to a program of root's,
and a terminal what is typed there."""
DAEMONS = (
    "/run/dbus", "/run/systemd/private", "/run/user", "/run/docker.sock", "/run/podman", "/run/containerd",
)  # fmt: skip
"""Sockets of those who start processes for others, which a file system that is read-only does not close."""


def enter(request: ProgramRequest) -> socket.socket | None:
    """Give this process users, mounts, messages and processes to come of its own, and a network if asked.
    Returns the socket of that network at which the gateway is to listen. Raises OSError naming the call that
    this host does not allow."""
    if request.user is not None:
        change_user(*request.user)
        kernel.set_dumpable(True)  # else the process's files in /proc are root's
    user, group = os.geteuid(), os.getegid()
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    if request.port is not None:
        flags |= kernel.CLONE_NEWNET
    kernel.unshare(flags, "unshare of users, mounts, processes and network")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if request.port is None:
        return None
    kernel.bring_loopback_up()
    listening = socket.create_server(("127.0.0.1", request.port), backlog=1024)
    listening.setblocking(False)
    return listening


def change_user(user: int, group: int) -> None:
    """Become another user for good. Raises OSError unless this process is root's."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def build_view(request: ProgramRequest) -> None:
    """Show this process the host's files read-only, without those that are covered. Raises OSError. What is
    covered stays so inside of what may be read or written, and what may be read or written stays in sight
    inside of what is covered; the same path in both is covered."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    trees = {path: kernel.writable_copy(path) for path in (request.directory, *request.writable)}
    trees |= {path: kernel.read_only_copy(path) for path in request.readable}
    directories = {path for path in trees if Path(path).is_dir()}
    devices = _copied_devices()
    kernel.make_read_only("/")
    _make_devices(devices)
    for path in sorted({*trees, *PRIVATE, *DAEMONS, *request.covered}):  # inner directories come on top
        if path in trees and path not in request.covered:
            make_place(Path(path), is_directory=path in directories)
            kernel.attach(trees[path], path)
        else:
            _cover(path, request.file_bytes if path in PRIVATE else COVER_BYTES)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def _copied_devices() -> list[tuple[Path, int]]:
    """Return the devices that a program finds, each with the descriptor of a mount that shows it."""
    paths = [path for name in DEVICES for path in Path("/dev").glob(name)]
    return [(path, kernel.read_only_copy(str(path), devices=True)) for path in paths]


def _make_devices(copied: Sequence[tuple[Path, int]]) -> None:
    """Put a /dev with these devices and terminals of its own in the place of the host's."""
    are_directories = [path.is_dir() for path, _ in copied]
    _cover("/dev", COVER_BYTES)
    for (path, tree), is_directory in zip(copied, are_directories, strict=True):
        make_place(path, is_directory=is_directory)
        kernel.attach(tree, str(path))
    for name, target in DEVICE_LINKS.items():
        Path("/dev", name).symlink_to(target)
    for name in ("shm", "pts"):
        Path("/dev", name).mkdir()
    Path("/dev").chmod(0o755)  # in a sticky directory that all may write, `> /dev/null` is refused
    flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
    kernel.mount("program", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")


def _cover(path: str, size_bytes: int) -> None:
    place = Path(path)
    try:
        is_directory = place.is_dir()
    except PermissionError:  # the program's user does not reach it either
        return
    if is_directory:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("program", path, "tmpfs", flags, f"size={size_bytes},mode=1777")
    elif place.exists():
        kernel.attach(kernel.read_only_copy("/dev/null", devices=True), path)


def become_program(request: ProgramRequest, stdin: int, output: int) -> None:
    """Turn this process into that of a program: its own session, limits, no privileges and no keyrings.
    Raises OSError for what the kernel does not allow; then nothing may run."""
    os.setsid()
    for place, descriptor in enumerate((stdin, output, output)):
        os.dup2(descriptor, place)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir(request.directory)
    if request.user is not None and not request.namespaces:
        change_user(*request.user)
    _limit(request)
    kernel.drop_capabilities()
    install_filter(without_keys())


def _limit(request: ProgramRequest) -> None:
    limits = [
        (resource.RLIMIT_CPU, request.cpu_s),
        (resource.RLIMIT_DATA, request.memory_bytes),
        (resource.RLIMIT_FSIZE, request.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ]
    if request.namespaces:  # elsewhere all processes of the user count
        limits.append((resource.RLIMIT_NPROC, request.processes))
    kernel.limit_resources(*limits)
