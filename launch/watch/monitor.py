"""The state of a run, gathered from the bus, which the terminal view and the summary show."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import structlog
from nats.aio.subscription import Subscription

from bus.codec import Json
from bus.connection import Bus
from bus.messages import EvaluationResult, Metrics, Status
from bus.waiting import set_within
from launch.watch.metrics import (
    History,
    Record,
    append_latest,
    append_records,
    evaluation_record,
    integer,
    is_counters,
    metrics_record,
    number,
    read_records,
)

log = structlog.get_logger()
SILENT_S = 5.0
"""Time without a status after which a process is shown as silent; status comes twice a second."""
SILENT_PERIODS = 2.5
"""The same in periods of the process's status, which are longer in a run of many actors."""
FORGET_S = 60.0
"""Time without a status after which an actor is no longer shown; its successor has another name."""
FLUSH_S = 1.0
MANY = 100
"""Processes from which their memory is summed once a second, and not with each status."""
DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RunSettings:
    """Settings of the run that no process reports."""

    name: str
    steps: int
    """Optimizer steps of reinforcement learning."""
    warmup_steps: int
    max_staleness: int
    """Upper bound on the versions that a trained token may lag."""
    samples_per_prompt: int
    target_accuracy: float | None = None


@dataclass
class Process:
    """Latest status of a process."""

    status: Status
    heard_s: float
    """Time of that status on the monitor's clock."""
    starts: int = 1
    """Number of processes that have used this name."""


class RunMonitor:
    """Pure state, fed by `on_...`; nothing here waits or writes. `clock` counts seconds."""

    def __init__(self, settings: RunSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.history = History()
        self.processes: dict[str, Process] = {}
        """Every process that ever sent a status, by source."""
        self.peak_rss_bytes: dict[str, int] = {}
        """Largest memory of any process of this name."""
        self.peak_rss_bytes_total = 0
        """Largest sum of the peaks of processes that ran together; they never used more at one moment."""
        self._clock = clock
        self._started_s = clock()
        self._noted: dict[str, int] = {}
        self._summed_s = -FLUSH_S
        self._published: dict[tuple[str, int], int] = {}

    # --- what comes in ---

    def on_status(self, status: Status) -> None:
        """Store a process's status."""
        known = self.processes.get(status.source)
        starts = 1 if known is None else known.starts + (known.status.pid != status.pid)
        self.processes[status.source] = Process(status, self._clock(), starts)
        if status.role == "actor":
            self._published[status.source, status.pid] = integer(status.values, "trajectories")
        self._remember_memory(status.source, status.peak_rss_bytes)

    def on_metrics(self, metrics: Metrics) -> Record:
        """Add a step to the history; returns its line for metrics.jsonl."""
        record = metrics_record(metrics)
        self.history.add(record)
        return record

    def on_evaluation(self, result: EvaluationResult) -> Record:
        """Add an evaluation to the history; returns its line for metrics.jsonl."""
        record = evaluation_record(result, step=max(0, result.policy_version - self.trains_from))
        self.history.add(record)
        return record

    def note_memory(self, process: str, peak_rss_bytes: int) -> None:
        """Count a process that sends no status, such as nats-server."""
        self._noted[process] = max(peak_rss_bytes, self._noted.get(process, 0))
        self._remember_memory(process, peak_rss_bytes)

    def _remember_memory(self, process: str, peak_rss_bytes: int) -> None:
        self.peak_rss_bytes[process] = max(peak_rss_bytes, self.peak_rss_bytes.get(process, 0))
        if len(self.processes) > MANY and self._clock() < self._summed_s + FLUSH_S:
            return
        self._summed_s = self._clock()
        alive = (p.status.peak_rss_bytes for p in self.processes.values() if not self.silent_s(p))
        together = sum(alive) + sum(self._noted.values())
        self.peak_rss_bytes_total = max(self.peak_rss_bytes_total, together)

    # --- what screens ask ---

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since this monitor began."""
        return self._clock() - self._started_s

    def silent_s(self, process: Process) -> float:
        """Return the seconds that a process has been silent; 0 while it speaks as often as it should."""
        silence = self._clock() - process.heard_s
        allowed_s = max(SILENT_S, SILENT_PERIODS * process.status.next_s)
        return silence if silence > allowed_s else 0.0

    def shown(self) -> list[Process]:
        """Return processes to show: learner, storage, others, then actors except those long gone."""
        order = {"learner": 0, "storage": 1, "actor": 3}
        found = [
            p
            for p in self.processes.values()
            if p.status.role != "actor" or self._clock() - p.heard_s < FORGET_S
        ]
        return sorted(found, key=lambda p: (order.get(p.status.role, 2), p.status.source))

    def actors(self) -> list[Process]:
        """Return the actors that are not silent."""
        return [p for p in self.processes.values() if p.status.role == "actor" and not self.silent_s(p)]

    def values(self, role: str) -> dict[str, Json]:
        """Return the latest values of the process that has `role`; none before its first status."""
        found = [process for process in self.processes.values() if process.status.role == role]
        return max(found, key=lambda process: process.heard_s).status.values if found else {}

    @property
    def stage(self) -> str:
        """Stage of the learner: starting, warmup, rl or done."""
        return str(self.values("learner").get("stage", "starting"))

    @property
    def trains_from(self) -> int:
        """Return the version with which reinforcement learning began; 0 as long as nobody knows."""
        learner = self.values("learner")
        if learner.get("stage") in ("rl", "done"):
            return integer(learner, "policy_version") - integer(learner, "step")
        return self.history.trains_from or 0

    @property
    def generated_tokens_per_s(self) -> float:
        """Return the tokens that all actors generate per second, without silent ones."""
        rates = (number(actor.status.values, "generated_tokens_per_s") for actor in self.actors())
        return sum(rate for rate in rates if rate == rate)

    @property
    def trajectories_published(self) -> int:
        """Return the number of trajectories counted by all actors that were ever heard; or those stored, if
        they are more."""
        return max(sum(self._published.values()), integer(self.values("storage"), "trajectories_stored"))

    @property
    def max_staleness_allowed(self) -> int:
        """Staleness that storage admits; before its first status, the configured one."""
        storage = self.values("storage")
        return (
            integer(storage, "max_staleness") if "max_staleness" in storage else self.settings.max_staleness
        )


async def watch(bus: Bus, monitor: RunMonitor, metrics_path: Path | None, stop: asyncio.Event) -> None:
    """Feed `monitor` from the bus until `stop`, and write what must outlive it to `metrics_path`.

    Counters of actors go to counters.jsonl beside it, of which only the latest are kept. What an earlier
    launch of the run left in `metrics_path` becomes part of the history. Set `stop` after the processes have
    ended and before the bus does, so that their last words are heard.
    """
    pending: list[Record] = []
    metrics, evaluation = bus.subject("events", "metrics"), bus.subject("events", "evaluation")
    subscriptions = [
        await bus.listen(bus.subject("status", "*"), Status, monitor.on_status),
        await bus.listen(metrics, Metrics, lambda m: pending.append(monitor.on_metrics(m))),
        await bus.listen(evaluation, EvaluationResult, lambda e: pending.append(monitor.on_evaluation(e))),
    ]
    if metrics_path is not None:
        earlier = await asyncio.to_thread(History, read_records(metrics_path))
        for record in pending:  # came meanwhile
            earlier.add(record)
        monitor.history = earlier
    while not stop.is_set():
        await set_within(stop, FLUSH_S)
        await _flush(pending, metrics_path)
    await _drain(subscriptions)
    await _flush(pending, metrics_path)


async def _flush(pending: list[Record], metrics_path: Path | None) -> None:
    records = pending.copy()
    pending.clear()
    if metrics_path is None:
        return
    counters = [record for record in records if is_counters(record)]
    if counters:
        await asyncio.to_thread(append_latest, metrics_path.with_name("counters.jsonl"), counters)
    if len(records) > len(counters):
        lasting = [record for record in records if not is_counters(record)]
        await asyncio.to_thread(append_records, metrics_path, lasting)


async def _drain(subscriptions: list[Subscription]) -> None:
    """Receive what was sent before now; a bus that is gone must not delay the end."""
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            for subscription in subscriptions:
                await subscription.drain()
    except (TimeoutError, nats.errors.Error) as error:
        log.warning("last_events_not_heard", reason=str(error) or type(error).__name__)
