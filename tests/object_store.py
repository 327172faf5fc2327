"""A real S3 server on loopback, which a test may end and start again. It keeps its buckets in memory."""

import socket
import subprocess
import sys
import time
import urllib.request

from bus.server.nats_server import free_port

HOST = "127.0.0.1"


class ObjectStore:
    """moto's server, as a process of its own."""

    def __init__(self) -> None:
        self.port = free_port(HOST)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Return once it takes connections."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", HOST, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((HOST, self.port), timeout=1.0).close()
            except OSError:
                assert self._process.poll() is None, "the S3 server ended"
                assert time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.02)
            else:
                return

    def begin(self) -> None:
        """Run, and keep nothing of what was before. To start takes a second."""
        if self._process is None:
            self.port = free_port(HOST)  # another may have taken the one before
            self.start()
        else:
            self._ask("POST", "moto-api/reset")

    def create_bucket(self, name: str) -> None:
        """Create a bucket, also one that is there already."""
        self._ask("PUT", name)

    def kill(self) -> None:
        """End it at once, with all that it keeps."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            self._process = None

    def _ask(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        urllib.request.urlopen(request, timeout=10).close()
