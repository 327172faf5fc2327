"""The numbers of a process in the text format of Prometheus, read when they are asked for."""

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bus.codec import Json
from bus.connection.process_state import ProcessState

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
    """Return all metrics of the process."""
    registry = CollectorRegistry()
    registry.register(_Sluice(state))
    return generate_latest(registry)


class _Sluice(Collector):
    """Makes metrics of a process's state, each labelled with the run and the role."""

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
    """Return the key as a Prometheus name, with its unit in full."""
    name = re.sub(r"\W", "_", key)
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')}_per_second"
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
