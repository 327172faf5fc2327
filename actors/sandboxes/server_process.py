"""The process that starts programs for an actor, which a sandbox and the agents' programs both have, and the
files by which it is handed them."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from actors.sandboxes.system_calls import supported
from bus.errors import ConfigError
from bus.process.child_process import module_command

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
END_TIMEOUT_S = 10.0
"""Longest time that the process may take to end before it is killed."""
START_TIMEOUT_S = 60.0
LARGEST_ANSWER = 4096
LARGEST_PACKET = 1 << 14
SERVER_ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Nothing of the actor's environment, which may hold passwords, comes near a program."""
REMEDY = (
    "a container needs --security-opt seccomp=unconfined --security-opt apparmor=unconfined, Ubuntu "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0, other hosts sysctl "
    "user.max_user_namespaces=10000, and all of them Linux 5.12 or later"
)


@dataclass(frozen=True, slots=True)
class ProgramServer:
    """The process that starts programs, and the socket that it listens on."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        """Have the server end, which it does once its socket is closed."""
        self.control.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def sealed_file(data: bytes, closing: ExitStack) -> int:
    """Return the descriptor of a file in memory that nobody can change, which `closing` closes."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    closing.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def started_server(module: str, settings: str) -> ProgramServer:
    """Start the process that starts programs in a sandbox. Raises ConfigError where it cannot do its work."""
    if not supported():
        raise ConfigError(
            "the sandbox needs Linux on x86_64 or aarch64: run the actors there, or leave the tools python "
            "and sandbox out of actors.environment.tools"
        )
    server = spawned(module, settings)
    try:
        server.control.settimeout(START_TIMEOUT_S)
        answer = json.loads(server.control.recv(LARGEST_ANSWER) or b'{"refused": "its process ended"}')
    except OSError as error:
        server.end()
        raise ConfigError(f"the sandbox's process did not start within {START_TIMEOUT_S:g} s") from error
    if "ready" not in answer:
        server.end()
        raise ConfigError(_refusal(answer))
    server.control.setblocking(False)
    return server


async def received(report: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet of a socket that does not block, with at most one descriptor."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(report, LARGEST_PACKET, 1)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(report, _note, readable)
            try:
                await readable
            finally:
                loop.remove_reader(report)
        else:
            return packet, descriptors


def _note(readable: "asyncio.Future[None]") -> None:
    if not readable.done():
        readable.set_result(None)


def spawned(module: str, *arguments: str) -> ProgramServer:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            module_command(module, *arguments), stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
            env=SERVER_ENVIRONMENT, cwd="/", start_new_session=True,
        )  # fmt: skip
    return ProgramServer(process, control)


def _refusal(answer: Mapping[str, str]) -> str:
    if "missing" in answer:
        return (
            f"a package of the sandbox cannot be loaded ({answer['missing']}): install it for the actor, or "
            "leave it out of the tool's `packages`"
        )
    return f"this host allows no sandbox ({answer['refused']}): {REMEDY}"
