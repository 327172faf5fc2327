"""`/healthz`, `/readyz` and `/metrics` of a process, answered by threads that notice a stuck event loop."""

import re
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bus.codec import Json
from bus.connection.process_state import ProcessState
from bus.errors import ConfigError
from launch.settings.run_config import MonitoringConfig

BY_LABEL = {
    "reasons": ("rejected_groups", "reason"),
    "dead_reasons": ("dead_messages", "reason"),
    "ends": ("episodes", "end"),
    "recent_ends": ("recent_episodes", "end"),
    "late_rewards": ("late_rewards", "state"),
    "trajectories_by_shard": ("shard_trajectories", "shard"),
}
"""Tables of numbers: the name of the metric, and the label that tells the entries apart."""
RENAMED = {
    "issued": "leases_issued",
    "rolling_out": "leases_rolling_out",
    "stored": "leases_stored",
    "trained": "leases_trained",
    "rejected": "leases_rejected",
    "stored_bytes": "retained_bytes",
    "trajectories_stored": "retained_trajectories",
}
COUNTERS = {
    "leases_issued", "rejected_groups", "closed_short", "late_siblings",
    "tokens_generated", "groups", "groups_with_rewards_due", "settled", "reused", "failed_episodes",
    "kept_turns", "expired_turns", "reused_turns", "reused_tokens",
    "repeated_episodes", "episodes",
    "rollout_episodes", "rollout_infra_failed_episodes",
    "rollout_reward_failed_episodes", "rollout_environment_failed_episodes",
    "trajectories", "rejected",
    "engine_busy_seconds", "engine_request_seconds", "engine_tokens",
    "replay_read_mapped", "replay_read_mapped_bytes", "replay_read_bus", "replay_read_bus_bytes",
    "restarts",
}  # fmt: skip
"""Numbers that only grow while a process lives; all others are gauges."""


def metrics_text(state: ProcessState) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Sluice(state))
    return generate_latest(registry)


class _Sluice(Collector):
    def __init__(self, state: ProcessState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        labels = {"run": self._state.run, "role": self._state.role}
        for metric in (*ProcessCollector(registry=None).collect(), *self._own()):
            metric.samples = [
                sample._replace(labels=labels | dict(sample.labels)) for sample in metric.samples
            ]
            yield metric

    def _own(self) -> Iterator[Metric]:
        state = self._state
        ready = state.connected and not state.waits_for
        yield GaugeMetricFamily("sluice_ready", "1 if the process does its work", float(ready))
        yield GaugeMetricFamily(
            "sluice_loop_silent_seconds", "Time for which the event loop is overdue", state.silent_s
        )
        if state.client is not None:
            yield GaugeMetricFamily("sluice_bus_connected", "1 if the bus answers", float(state.connected))
            for name, value in state.client.stats.items():
                if name in _BUS:
                    yield CounterMetricFamily(f"sluice_bus_{_BUS[name][0]}", _BUS[name][1], float(value))
            refused = float(state.messages_refused)
            text = "Requests and notices of streams, or with an answer elsewhere than in an inbox"
            yield CounterMetricFamily("sluice_bus_messages_refused", text, refused)
        yield from _families(state.role, {**state.metrics, **state.values})


_BUS = {
    "in_msgs": ("messages_received", "Messages from the bus"),
    "out_msgs": ("messages_sent", "Messages to the bus"),
    "in_bytes": ("received_bytes", "Bytes from the bus"),
    "out_bytes": ("sent_bytes", "Bytes to the bus"),
    "reconnects": ("reconnections", "Connections to the bus after the first"),
}
"""nats-py's statistics of a connection: the name of the metric, and its help text."""


def _families(role: str, values: Mapping[str, Json]) -> Iterator[Metric]:
    """Return a metric for each number, table of numbers and list; other values are left out."""
    for key, value in sorted(values.items()):
        name = _name(RENAMED.get(key, key) if role == "storage" else key)
        if key in BY_LABEL and isinstance(value, Mapping):
            yield from _table(role, *BY_LABEL[key], _numbers(value))
        elif isinstance(value, list | tuple | Mapping):
            yield GaugeMetricFamily(f"sluice_{role}_{name}", f"Number of {key}", float(len(value)))
        elif isinstance(value, bool | int | float):
            yield _family(role, name, f"{key} of the {role}", float(value))


def _family(role: str, name: str, text: str, value: float) -> Metric:
    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    return kind(f"sluice_{role}_{name}", text, value)


def _table(role: str, name: str, label: str, entries: Iterable[tuple[str, float]]) -> Iterator[Metric]:
    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    family = kind(f"sluice_{role}_{name}", f"{name} of the {role} by {label}", labels=[label])
    for entry, value in entries:
        family.add_metric([entry], value)
    yield family


def _numbers(table: Mapping[str, Json]) -> list[tuple[str, float]]:
    return [(str(key), float(value)) for key, value in table.items() if isinstance(value, int | float)]


def _name(key: str) -> str:
    name = re.sub(r"\W", "_", key)
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')}_per_second"
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


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
    """Note that the event loop turns and, if a port is set, serve `state` over HTTP while inside. Raises
    `ConfigError` for an address that is not available."""
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
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what goes wrong with a connection, most often that it broke."""
        log.debug("health_request_failed", client=str(client_address), exc_info=True)

    def answer(self, path: str) -> Answer:
        match path:
            case "/healthz":
                return self._health()
            case "/readyz":
                return self._readiness()
            case "/metrics":
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
    server: _ProbeServer
    timeout = REQUEST_TIMEOUT_S
    server_version = "sluice"
    sys_version = ""

    def do_GET(self) -> None:
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
