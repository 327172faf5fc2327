"""System calls that Python's `os` lacks, for building namespaces and giving up privileges. Linux only."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
LIKELIEST_TO_BE_KILLED: Final = "1000"
"""Score by which the kernel picks what to kill when memory is short: a program goes before the actor."""
MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000

# The numbers of system calls from 424 on are the same on all architectures.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x1, 0x2, 0x4
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int, what: str) -> None:
    """Give this process namespaces of its own. Raises OSError whose message begins with `what`."""
    _checked(_libc.unshare(flags), what)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system. Raises OSError."""
    arguments = source.encode(), target.encode(), kind.encode() if kind else None
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {kind or source} on {target}")


def read_only_copy(path: str, *, devices: bool = False) -> int:
    """Return a descriptor of a mount that shows `path` and what is below it read-only, attached nowhere yet.
    Raises OSError, on Linux before 5.12 too."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    tree = _checked(_libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")
    wanted = _ATTR_NOSUID | (0 if devices else _ATTR_RDONLY | _ATTR_NODEV)
    attributes = _MountAttributes(set=wanted)
    result = _libc.syscall(
        _MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip
    _checked(result, f"mount_setattr {path}")
    return tree


def writable_copy(path: str) -> int:
    """Return a descriptor of a mount that shows `path` and what is below it, attached nowhere yet. Raises
    OSError."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE
    return _checked(_libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def make_read_only(path: str) -> None:
    """Make the mount at `path`, and all mounts below it, read-only. Raises OSError."""
    attributes = _MountAttributes(set=_ATTR_RDONLY | _ATTR_NOSUID)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip
    _checked(result, f"mount_setattr {path}")


def attach(tree: int, target: str) -> None:
    """Attach a mount that one of the functions above returned at `target`, and close its descriptor. Raises
    OSError."""
    result = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(result, f"move_mount to {target}")
    os.close(tree)


def become_root(directory: str) -> None:
    """Make a mounted directory this process's `/`, and let go of what was there before. Raises OSError."""
    os.chdir(directory)
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that forked it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Have descendants whose parents end become children of this process, whatever session they are in."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def bring_loopback_up() -> None:
    """Let processes of this network namespace reach each other at 127.0.0.1. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        found = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, name + bytes(24))
        [flags] = struct.unpack_from("H", found, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, name + struct.pack("H22x", flags | _IFF_UP))


def set_dumpable(dumpable: bool) -> None:
    """Say whether processes of the same user may look into this one; its own files in /proc depend on it."""
    _checked(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "PR_SET_DUMPABLE")


def limit_resources(*limits: tuple[int, int]) -> None:
    """Bound what this process may take of each resource, as far as it is not bounded lower itself."""
    for kind, wanted in limits:
        _, highest = resource.getrlimit(kind)
        value = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    """Give up every capability for good, and those that a program with set-user-ID would bring."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # the kernel knows no further ones
    header, data = _CapabilityHeader(version=_CAPABILITY_VERSION_3, pid=0), (_CapabilityData * 2)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
