"""The filter of system calls (seccomp) of a program in the sandbox, as a BPF program of the kernel's.
Namespaces and limits do the containing; the filter takes away what a program does not need and what makes
most of the kernel's surface: other programs, sockets, namespaces, mounts, keys, tracing, io_uring and BPF."""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Collection, Iterator
from typing import Final

MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""What the kernel calls an architecture, and its column in `DENIED`."""
DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # programs and other processes
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "personality": (135, 92),
    # network
    "socket": (41, 198),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None),
}  # fmt: skip
"""System calls that fail with EPERM, with their numbers on x86_64 and aarch64."""
NEEDED_BY_COMMANDS: Final = frozenset((
    "execve", "execveat", "ptrace", "kcmp", "process_vm_readv", "process_vm_writev", "process_madvise",
    "pidfd_getfd", "personality", "socket", "mq_open",
))  # fmt: skip
"""Calls that commands of an episode's sandbox may make: it has processes, network and messages of its own.
Those that make memory of no process and no file of the sandbox are not, since nothing would bound it."""
_FAMILIES = (1, 2, 10, 16)
"""Sockets that these may make: Unix, IPv4, IPv6 and netlink. Others, such as vsock, know no namespaces."""
_CLONE = (56, 220)
_CLONE3 = 435
_KEY_CALLS: Final = {
    0xC000003E: (248, 249, 250), 0x40000003: (286, 287, 288),  # x86_64, and programs of 32 bits there
    0xC00000B7: (217, 218, 219), 0x40000028: (309, 310, 311),  # aarch64, and programs of 32 bits there
}  # fmt: skip
"""Numbers of add_key, request_key and keyctl by architecture."""
_SHORT_POINTERS = 0x40000000
"""Bit in the numbers of x86_64's calls by programs with pointers of 32 bits."""
_FIRST_UNKNOWN = 470
"""Numbers from here on, which this file has not seen, do not exist for a program (ENOSYS)."""
_NEW_NAMESPACES = 0x7E020080
"""Flags of clone that make namespaces."""
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Places in `struct seccomp_data`; of the argument its lower half."""
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_program(machine: str, allowed: Collection[str] = ()) -> bytes:
    """Return the BPF program for a machine of this name, which denies what is not in `allowed`. Raises
    KeyError for a machine without numbers here."""
    instructions = _instructions(*MACHINES[machine], allowed)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _instructions(
    architecture: int, column: int, allowed: Collection[str]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield code, places to skip if true, places to skip if false, and constant."""
    denied, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _JUMP_EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _JUMP_AT_LEAST, 0, 1, _FIRST_UNKNOWN
    yield _RETURN, 0, 0, unknown
    if (socket := DENIED["socket"][column]) is not None and "socket" in allowed:
        yield _JUMP_EQUAL, 0, len(_FAMILIES) + 3, socket
        yield _LOAD, 0, 0, _FIRST_ARGUMENT
        for place, family in enumerate(_FAMILIES):
            yield _JUMP_EQUAL, len(_FAMILIES) - place, 0, family
        yield _RETURN, 0, 0, denied
        yield _RETURN, 0, 0, _ALLOW
    for name, numbers in DENIED.items():
        if (number := numbers[column]) is not None and name not in allowed:
            yield _JUMP_EQUAL, 0, 1, number
            yield _RETURN, 0, 0, denied
    yield _JUMP_EQUAL, 0, 1, _CLONE3  # clone3's flags lie in memory, which no filter sees: libc takes clone
    yield _RETURN, 0, 0, unknown
    yield _JUMP_EQUAL, 0, 4, _CLONE[column]
    yield _LOAD, 0, 0, _FIRST_ARGUMENT
    yield _AND, 0, 0, _NEW_NAMESPACES
    yield _JUMP_EQUAL, 1, 0, 0
    yield _RETURN, 0, 0, denied
    yield _RETURN, 0, 0, _ALLOW


def without_keys() -> bytes:
    """Return the BPF program that denies the kernel's keyrings, which namespaces do not hide, and no more."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _without_keys())


def _without_keys() -> Iterator[tuple[int, int, int, int]]:
    yield _LOAD, 0, 0, _ARCHITECTURE
    for architecture, numbers in _KEY_CALLS.items():
        yield _JUMP_EQUAL, 0, len(numbers) + 4, architecture
        yield _LOAD, 0, 0, _NUMBER
        yield _AND, 0, 0, ~_SHORT_POINTERS & 0xFFFFFFFF
        for place, number in enumerate(numbers):
            yield _JUMP_EQUAL, len(numbers) - place, 0, number
        yield _RETURN, 0, 0, _ALLOW
        yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW


def install_filter(program: bytes) -> None:
    """Put this thread and all that it starts under the filter; needs no_new_privs. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = _Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(held), 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def supported() -> bool:
    """Return whether the numbers of this machine's system calls are known here."""
    return sys.platform == "linux" and os.uname().machine in MACHINES
