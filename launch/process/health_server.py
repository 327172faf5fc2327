"""`/healthz`, `/readyz` and `/metrics` of a process, answered by threads that notice a stuck event loop."""

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import structlog

from bus.connection.process_state import ProcessState
from bus.errors import ConfigError
from launch.settings.run_config import MonitoringConfig

log = structlog.get_logger()
MOST_REQUESTS = 32
"""Connections that are served at a time; further ones are closed."""
REQUEST_TIMEOUT_S = 10.0
"""Longest silence of a connection."""
POLL_S = 0.05
"""Seconds after which the server notices that it is to end."""
Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""
PLAIN = "text/plain; charset=utf-8"


@asynccontextmanager
async def monitored(config: MonitoringConfig, state: ProcessState) -> AsyncIterator[None]:
    """Note that the event loop turns and, if a port is set, serve `state` over HTTP while inside.

    Raises `ConfigError` for an address that is not available."""
    if config.port is None:
        yield
        return
    server = _bound(config, state)
    # In threads of its own: the event loop could not say that it is stuck.
    serving = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="health server", daemon=True)
    async with state.turning():
        serving.start()
        host, port = server.server_address[:2]
        log.info("health_server_ready", url=f"http://{_shown(str(host))}:{port}", role=state.role)
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


def _bound(config: MonitoringConfig, state: ProcessState) -> "_ProbeServer":
    try:
        return _ProbeServer(config, state)
    except OSError as error:
        raise ConfigError(
            f"monitoring.port={config.port}: cannot listen at {config.host}:{config.port} "
            f"({error.strerror}): choose another for each process of this host, or 0 for any that is free"
        ) from error


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _ProbeServer(ThreadingHTTPServer):
    """Serves one process's state; it never waits for its connections when it ends."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, config: MonitoringConfig, state: ProcessState) -> None:
        self.address_family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._config = config
        self._state = state
        self._slots = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__((config.host, config.port or 0), _Handler)

    def server_bind(self) -> None:
        """Bind as TCP servers do: those of HTTP ask for the host's name, which may take long."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection, unless there are too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what goes wrong with a connection, most often that it broke."""
        log.debug("health_request_failed", client=str(client_address), exc_info=True)

    def answer(self, path: str) -> Answer:
        """Return what a request for `path` is answered."""
        match path:
            case "/healthz":
                return self._health()
            case "/readyz":
                return self._readiness()
            case "/metrics":
                from prometheus_client import CONTENT_TYPE_LATEST

                from launch.process.prometheus import metrics_text

                return HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics_text(self._state)
        return _plain(HTTPStatus.NOT_FOUND, "there are /healthz, /readyz and /metrics")

    def _health(self) -> Answer:
        if (silent_s := self._state.silent_s) > self._config.stuck_after_s:
            words = f"stuck: the event loop has not turned for {silent_s:.0f} s, while: {self._state.doing}"
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, words)
        return _plain(HTTPStatus.OK, "healthy")

    def _readiness(self) -> Answer:
        health = self._health()
        if health[0] != HTTPStatus.OK:
            return health
        if not self._state.connected:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "not ready: the bus is away")
        if self._state.waits_for:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: waiting for {self._state.waits_for}")
        return _plain(HTTPStatus.OK, f"ready: {self._state.doing}")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: _ProbeServer
    timeout = REQUEST_TIMEOUT_S
    server_version = "sluice"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        status, kind, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""


def _plain(status: HTTPStatus, words: str) -> Answer:
    return status, PLAIN, f"{words}\n".encode()
