"""The process that starts programs for an actor, which a sandbox and the agents' programs both have, and the
files by which it is handed them."""

import fcntl
import os
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
END_TIMEOUT_S = 10.0
"""Longest time that the process may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class ProgramServer:
    """The process that starts programs, and the socket that it listens on."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        """Have it end, which it does once its socket is closed."""
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
