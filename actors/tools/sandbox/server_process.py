"""The process that starts programs for an actor, which a sandbox and the agents' programs both have."""

import socket
import subprocess
from dataclasses import dataclass

END_TIMEOUT_S = 10.0
"""Longest time that the process may take to end before it is killed."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
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
