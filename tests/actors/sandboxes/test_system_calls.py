"""The filter of system calls, run by an interpreter of its own for both architectures."""

import errno
import struct

import pytest

from actors.sandboxes.system_calls import DENIED, MACHINES, NEEDED_BY_COMMANDS, filter_program

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
READ, CLONE, CLONE3 = {"x86_64": 0, "aarch64": 63}, {"x86_64": 56, "aarch64": 220}, 435


def decided(program: bytes, architecture: int, number: int, first_argument: int = 0) -> int:
    """Run classic BPF on `struct seccomp_data` (linux/seccomp.h, linux/bpf_common.h)."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, first_argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        code, if_true, if_false, constant = instructions[place]
        place += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, constant)
            case 0x54:
                accumulator &= constant
            case 0x15:
                place += if_true if accumulator == constant else if_false
            case 0x35:
                place += if_true if accumulator >= constant else if_false
            case 0x06:
                return constant


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_denies_its_list_and_lets_the_rest_pass(machine):
    program, (architecture, column) = filter_program(machine), MACHINES[machine]
    denied = {numbers[column] for numbers in DENIED.values()} - {None}
    for number in range(470):
        expected = EPERM if number in denied else ENOSYS if number == CLONE3 else ALLOW
        assert decided(program, architecture, number) == expected, number
    assert decided(program, architecture, 470) == ENOSYS
    assert decided(program, architecture, READ[machine]) == ALLOW
    assert decided(program, architecture ^ 1, READ[machine]) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_commands_make_programs_and_sockets_of_known_families_and_nothing_else_that_is_denied(machine):
    program, (architecture, column) = filter_program(machine, NEEDED_BY_COMMANDS), MACHINES[machine]
    for name, numbers in DENIED.items():
        if (number := numbers[column]) is not None and name != "socket":
            expected = ALLOW if name in NEEDED_BY_COMMANDS else EPERM
            assert decided(program, architecture, number) == expected, name
    made = [n for n in range(64) if decided(program, architecture, DENIED["socket"][column], n) == ALLOW]
    assert made == [1, 2, 10, 16]
    assert {decided(program, architecture, n) for n in (CLONE3, 470)} == {ENOSYS}
    assert decided(program, architecture, CLONE[machine], 0x10000000) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_a_child_may_be_forked_but_not_into_namespaces(machine):
    program, architecture = filter_program(machine), MACHINES[machine][0]
    fork, thread = 0x01200011, 0x003D0F00
    assert {decided(program, architecture, CLONE[machine], flags) for flags in (fork, thread)} == {ALLOW}
    for new in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decided(program, architecture, CLONE[machine], fork | new) == EPERM


def test_numbers_are_those_of_the_kernel_headers():
    """A sample by hand, from asm/unistd_64.h and asm-generic/unistd.h."""
    known = {
        "execve": (59, 221),
        "ptrace": (101, 117),
        "socket": (41, 198),
        "mount": (165, 40),
        "bpf": (321, 280),
    }
    assert {name: DENIED[name] for name in known} == known
