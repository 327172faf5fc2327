"""The file system and namespaces of the sandbox: Python's own files read-only, a small /tmp, and no network.
`enter` is called once by the process that starts programs, `private_namespaces` once for each program.
Neither needs privileges, where the kernel lets ordinary users make namespaces."""

import os
import resource
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from actors.sandboxes import kernel

NOBODY = 65534
"""User and group that programs run as on the host, where the actor runs as root."""
INSIDE = 1000
"""User and group that a program sees itself as."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx",
}  # fmt: skip
"""Names in /dev, and what they lead to."""
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


class Host:
    """The host's /proc, held open: inside there is none, and maps of users are written there."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, name: str, text: str) -> None:
        """Write one of this process's own files in /proc. Raises OSError."""
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=self._proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def read(self, name: str) -> str:
        """Return what a file in /proc holds, which is below a page. Raises OSError."""
        descriptor = os.open(name, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(descriptor, resource.getpagesize()).decode()
        finally:
            os.close(descriptor)


def python_directories(packages: Iterable[str]) -> list[str]:
    """Return the directories that Python programs need, each once and none below another."""
    own = sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib"
    return outermost((*SYSTEM_LIBRARIES, *own, *packages))


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the directories that exist, with what they link to, each once and none below another."""
    there = [path for path in paths if Path(path).is_dir()]
    named = {*there, *(str(Path(path).resolve()) for path in there)}
    return sorted(path for path in named if not any(path.startswith(f"{other}/") for other in named))


def enter(
    shown: Iterable[str], furnish: Callable[[Path], None], host: Host, *, processes: bool = False
) -> None:
    """Leave the host's network, processes' messages and files for good.

    Raises OSError naming the call that this host does not allow.

    Args:
        shown: files and directories of the host that are seen read-only.
        furnish: makes what else is there, below the directory that becomes `/`.
        host: its /proc.
        processes: whether the host's /proc is there, over which a namespace of processes mounts its own."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        kernel.unshare(flags, "unshare of mounts and network as root")
        os.setgroups([])
    else:
        kernel.unshare(flags | kernel.CLONE_NEWUSER, "unshare of users, mounts and network")
        _map_ids(host, (user, user), (group, group))
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    _build_tree(shown, furnish, processes=processes)


def _map_ids(host: Host, user: tuple[int, int], group: tuple[int, int]) -> None:
    """Map one user and one group into the user namespace of this process: (inside, outside) each."""
    host.write("setgroups", "deny")
    host.write("uid_map", f"{user[0]} {user[1]} 1")
    host.write("gid_map", f"{group[0]} {group[1]} 1")


def _build_tree(shown: Iterable[str], furnish: Callable[[Path], None], *, processes: bool) -> None:
    copies = [(path, kernel.read_only_copy(path)) for path in shown]
    copies += [(path, kernel.read_only_copy(path, devices=True)) for path in DEVICES]
    if processes:  # a writable mount over a read-only one is refused
        copies.append(("/proc", kernel.writable_copy("/proc")))
    are_directories = [Path(path).is_dir() for path, _ in copies]
    root = "/tmp"  # /tmp is there on every host, and hidden for this process alone
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("sandbox", root, "tmpfs", plain, "size=1m,nr_inodes=1k,mode=755")
    for (path, tree), is_directory in zip(copies, are_directories, strict=True):
        make_place(Path(root + path), is_directory=is_directory)
        kernel.attach(tree, root + path)
    furnish(Path(root))
    kernel.become_root(root)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | plain)


def make_place(place: Path, *, is_directory: bool) -> None:
    """Make what a mount is attached to, where it is not there."""
    if is_directory:
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def private_namespaces(host: Host, home: str, *, file_bytes: int, files: int) -> None:
    """Give the process of one program its own users, processes to come, and an empty directory `home`. Raises
    OSError."""
    own_namespaces(host)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    kernel.mount("program", home, "tmpfs", flags, f"size={file_bytes},nr_inodes={files + 1},mode=700")


def own_namespaces(host: Host, further: int = 0) -> None:
    """Give this process users, mounts and processes to come of its own, and `further` namespaces. Raises
    OSError."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        user = group = NOBODY
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        kernel.set_dumpable(True)  # else the process's files in /proc are root's
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID
    kernel.unshare(flags | further, "unshare of a program")
    _map_ids(host, (INSIDE, user), (INSIDE, group))
