"""The state of a run, gathered from the bus, which the terminal view and the summary show."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Self

import nats.errors
import structlog
from nats.aio.subscription import Subscription

from actors.settings.actors import ActorsConfig
from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import BusError
from bus.evaluation_messages import EvaluationResult
from bus.messages import Metrics, Status
from bus.streams.stream_reader import StreamPosition, StreamReader
from bus.waiting import set_within
from launch.run_view.history import History, is_step, is_warmup
from launch.run_view.status_texts import further_policies, recent_ends
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.metrics.recorder import decoded_event, recorded_place
from storage.metrics.records import event_record, integer, number, read_records

log = structlog.get_logger()
SILENT_S = 5.0
"""Time without a status after which a process is shown as silent; status comes twice a second."""
SILENT_PERIODS = 2.5
"""The same in periods of the process's status, which are longer in a run of many actors."""
FORGET_S = 60.0
"""Time without a status after which an actor is forgotten; its successor has another name."""
KEPT_PEAKS = 1000
"""Processes beyond which the memory of forgotten actors is forgotten too."""
KEPT_COUNTS = 10_000
"""Actors that left of which the trajectories are kept by name, so that one that comes back counts once."""
PERIOD_S = 0.5
"""Time between two looks for new events."""
BATCH = 512
DRAIN_TIMEOUT_S = 2.0


def _trajectories_per_rollout(actors: ActorsConfig) -> int | None:
    each = {environment.trajectories_per_rollout for environment in actors.by_name.values()}
    return each.pop() if len(each) == 1 else None


@dataclass(frozen=True)
class RunSettings:
    """Settings of the run that no process reports."""

    name: str
    steps: int
    warmup_steps: int
    max_staleness: int
    """Upper bound on the versions that a trained token may lag."""
    samples_per_prompt: int
    target_accuracy: float | None = None
    has_rollouts: bool = True
    trajectories_per_rollout: int | None = 1
    """Most trajectories of one rollout; `None` where that depends on the rollout."""

    @classmethod
    def of_run(cls, config: RunConfig) -> Self:
        return cls(
            name=config.run,
            steps=config.learner.steps,
            warmup_steps=config.warmup.steps,
            max_staleness=config.admission.max_staleness,
            samples_per_prompt=config.admission.samples_per_prompt,
            trajectories_per_rollout=_trajectories_per_rollout(config.actors),
            target_accuracy=config.learner.target_accuracy,
            has_rollouts=config.has_rollouts,
        )


@dataclass(frozen=True)
class PartEnding:
    """How a process of this launch ended."""

    pid: int
    at_s: float
    """Time of the end on the monitor's clock."""
    reason: str = ""
    """Last words of the process, or the status that it ended with; empty where it ended in order."""
    becomes: str = "it starts again"
    """What becomes of the part."""

    @property
    def text(self) -> str:
        return f"ended: {self.reason}; {self.becomes}" if self.reason else "ended"


@dataclass
class HeardProcess:
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
        self.processes: dict[str, HeardProcess] = {}
        """Every process that sent a status, by source, without actors that are forgotten."""
        self.peak_rss_bytes: dict[str, int] = {}
        """Largest memory of any process of this name; of forgotten actors as many as `KEPT_PEAKS` allows."""
        self.peak_rss_bytes_total = 0
        """Largest sum of the peaks of processes that ran together; they never used more at one moment."""
        self.full_disk = ""
        """What is wrong with the disk of the run, if it is full."""
        self.newest_step_s: float | None = None
        """Time at which the bus got the figures of a step last, by its clock."""
        self.endings: Mapping[str, PartEnding] = {}
        """How the latest process of each part of this launch ended that has ended, by the part's name."""
        self._clock = clock
        self._started_s = self._answered_s = clock()
        self._is_answered = True
        self._noted: dict[str, int] = {}
        self._latest: dict[str, HeardProcess] = {}
        self._actors: OrderedDict[str, None] = OrderedDict()
        """Sources of actors, the longest silent first."""
        self._speaking: OrderedDict[str, int] = OrderedDict()
        """Peak memory of processes that are not silent, by source, the longest silent first."""
        self._speaking_bytes = 0
        self._published: OrderedDict[tuple[str, int], int] = OrderedDict()
        """Trajectories of each actor's process, the longest silent first."""
        self._published_total = 0

    # --- what comes in ---

    def on_status(self, status: Status) -> None:
        """Store a process's status. The cost does not depend on how many processes there are."""
        known = self.processes.get(status.source)
        starts = 1 if known is None else known.starts + (known.status.pid != status.pid)
        process = HeardProcess(status, self._clock(), starts)
        self.processes[status.source] = self._latest[status.role] = process
        if status.role == "actor":
            self._actors[status.source] = None
            self._actors.move_to_end(status.source)
            self._count(status)
        self._speaking_bytes += status.peak_rss_bytes - self._speaking.get(status.source, 0)
        self._speaking[status.source] = status.peak_rss_bytes
        self._speaking.move_to_end(status.source)
        self._forget_silent()
        self._remember_memory(status.source, status.peak_rss_bytes)

    def _count(self, status: Status) -> None:
        """Count an actor's trajectories. Of actors that left long ago only the sum is kept."""
        process, published = (status.source, status.pid), integer(status.values, "trajectories")
        self._published_total += published - self._published.get(process, 0)
        self._published[process] = published
        self._published.move_to_end(process)
        if len(self._published) > len(self._actors) + KEPT_COUNTS:
            self._published.popitem(last=False)

    def _forget_silent(self) -> None:
        """Forget actors that were silent for `FORGET_S`. Each process is looked at once for each silence."""
        now_s = self._clock()
        while self._speaking and now_s - self._heard_s(next(iter(self._speaking))) > SILENT_S:
            self._speaking_bytes -= self._speaking.popitem(last=False)[1]
        while self._actors and now_s - self._heard_s(next(iter(self._actors))) > FORGET_S:
            source, _ = self._actors.popitem(last=False)
            if self._latest.get("actor") is self.processes.pop(source):
                del self._latest["actor"]
            if len(self.peak_rss_bytes) > KEPT_PEAKS:
                del self.peak_rss_bytes[source]

    def _heard_s(self, source: str) -> float:
        return self.processes[source].heard_s

    def on_event(self, event: Metrics | EvaluationResult, time_s: float) -> None:
        """Add to the history a step or an evaluation, which the bus got at `time_s`."""
        latest = integer(self.values("learner"), "policy_version")
        record = event_record(event, trains_from=self.trains_from, time_s=time_s, learner_version=latest)
        if is_step(record) or is_warmup(record):  # and no figures of storage or of a shadow learner
            self.newest_step_s = time_s
        self.history.add(record)

    def on_answer(self, answered: bool) -> None:
        self._is_answered = answered
        if answered:
            self._answered_s = self._clock()

    def note_memory(self, process: str, peak_rss_bytes: int) -> None:
        """Count a process that sends no status, such as nats-server."""
        self._forget_silent()
        self._noted[process] = max(peak_rss_bytes, self._noted.get(process, 0))
        self._remember_memory(process, peak_rss_bytes)

    def _remember_memory(self, process: str, peak_rss_bytes: int) -> None:
        self.peak_rss_bytes[process] = max(peak_rss_bytes, self.peak_rss_bytes.get(process, 0))
        together = self._speaking_bytes + sum(self._noted.values())
        self.peak_rss_bytes_total = max(self.peak_rss_bytes_total, together)

    # --- what screens ask ---

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def bus_silent_s(self) -> float:
        """Return the seconds for which the bus has not answered; 0 where the latest question was answered."""
        return 0.0 if self._is_answered else self._clock() - self._answered_s

    def silent_s(self, process: HeardProcess) -> float:
        """Return the seconds that a process has been silent; 0 while it speaks as often as it should."""
        silence = self._clock() - process.heard_s
        allowed_s = max(SILENT_S, SILENT_PERIODS * process.status.next_s)
        return silence if silence > allowed_s else 0.0

    def ending(self, process: HeardProcess) -> PartEnding | None:
        """Return how a process of this launch ended, of which nothing was heard since; None for others.

        A learner of several ranks is heard by another process id than that of its part. Actors may be those
        of other hosts, so theirs have to be equal."""
        role, pid = process.status.role, process.status.pid
        ending = self._ending_of(role)
        if ending is None or not (pid == ending.pid or (role != "actor" and process.heard_s <= ending.at_s)):
            return None
        return ending

    def has_ended(self, process: HeardProcess) -> bool:
        """Return whether a process ended in order: its launch says so, or its run is done."""
        if (ending := self.ending(process)) is not None:
            return not ending.reason
        return self.stage == "done" and self.silent_s(process) > 0

    def failure(self, process: HeardProcess) -> str:
        """Return in words that a process of this launch did not end in order; empty for any other."""
        ending = self.ending(process)
        return "" if ending is None or not ending.reason else ending.text

    def is_latest(self, process: HeardProcess) -> bool:
        """Return whether no other process of its role was heard later."""
        return self._latest[process.status.role] is process

    def failure_unheard(self, role: str) -> str:
        """Return in words that the latest process with a role, of which no process was heard, did not end in
        order; empty where nothing says so."""
        ending = self._ending_of(role)
        return "" if ending is None or not ending.reason else ending.text

    def _ending_of(self, role: str) -> PartEnding | None:
        return self.endings.get("actors" if role == "actor" else role)

    def shown(self) -> list[HeardProcess]:
        """Return processes to show: learner, storage, others, then actors except those long gone."""
        order = {"learner": 0, "storage": 1, "actor": 3}
        found = [
            p
            for p in self.processes.values()
            if p.status.role != "actor" or self._clock() - p.heard_s < FORGET_S
        ]
        return sorted(found, key=lambda p: (order.get(p.status.role, 2), p.status.source))

    def actors(self) -> list[HeardProcess]:
        return [p for p in map(self.processes.__getitem__, self._actors) if not self.silent_s(p)]

    def values(self, role: str) -> dict[str, Json]:
        """Return the latest values of the process that has `role`; none before its first status."""
        latest = self._latest.get(role)
        return {} if latest is None else latest.status.values

    @property
    def alarms(self) -> dict[str, Json]:
        """Return the alarms that held when each process was heard last, by its name."""
        found = {name: p.status.values.get("alarm") for name, p in sorted(self.processes.items())}
        return {name: alarm for name, alarm in found.items() if alarm}

    @property
    def stage(self) -> str:
        """Stage of the learner: starting, warmup, rl or done. A run without a warm-up has none of it."""
        stage = str(self.values("learner").get("stage", "starting"))
        return "starting" if stage == "warmup" and not self.settings.warmup_steps else stage

    @property
    def absent_roles(self) -> list[str]:
        """Return the roles of which no process has reported; none once the learner says what it does."""
        if self.stage != "starting":
            return []
        there = {process.status.role for process in self.shown()}
        roles = ("learner", "storage", *(["actor"] if self.settings.has_rollouts else []))
        return [role for role in roles if role not in there]

    @property
    def learner_has_ended(self) -> bool:
        """Return whether the learner was done before it fell silent."""
        learner = self._latest.get("learner")
        return self.stage == "done" and learner is not None and self.has_ended(learner)

    @property
    def trains_from(self) -> int:
        """Return the version with which reinforcement learning began; 0 as long as nobody knows."""
        learner = self.values("learner")
        if learner.get("stage") in ("rl", "done"):
            return integer(learner, "policy_version") - integer(learner, "step")
        return self.history.trains_from or 0

    @property
    def generated_tokens_per_s(self) -> float:
        """Return the tokens that all actors generate per second, without silent ones; NaN where none is
        heard."""
        rates = [number(actor.status.values, "generated_tokens_per_s") for actor in self.actors()]
        return sum(rate for rate in rates if rate == rate) if rates else nan

    @property
    def trained_tokens_per_s(self) -> float:
        """Return the tokens that the learner trains on per second; NaN where it is not heard."""
        learner = self._latest.get("learner")
        return (
            nan
            if learner is None or self.silent_s(learner)
            else number(learner.status.values, "trained_tokens_per_s")
        )

    @property
    def recent_ends(self) -> dict[str, int]:
        """Return how many recent episodes of the actors that are not silent ended how."""
        return recent_ends(actor.status.values for actor in self.actors())

    @property
    def policies(self) -> dict[str, dict[str, Json]]:
        return further_policies(actor.status.values for actor in self.actors())

    @property
    def trajectories_published(self) -> int:
        """Return the number of trajectories counted by all actors that were ever heard; or those stored, if
        they are more."""
        return max(self._published_total, integer(self.values("storage"), "trajectories_stored"))

    @property
    def max_staleness_allowed(self) -> int:
        """Staleness that storage admits; before its first status, the configured one."""
        storage = self.values("storage")
        return (
            integer(storage, "max_staleness") if "max_staleness" in storage else self.settings.max_staleness
        )


async def watch(
    bus: Bus, monitor: RunMonitor, stop: asyncio.Event, *, run: RunDirectory | None = None
) -> None:
    """Feed `monitor` from the bus until `stop`: with the metrics and evaluations that EVENTS still holds, and
    before them with those that storage has recorded in `run`, if that is on this host. Set `stop` after the
    processes have ended and before the bus does, so that their last words are heard."""
    statuses = await bus.listen(bus.subject("status", "*"), Status, monitor.on_status)
    place = StreamPosition()
    if run is not None:
        place = await asyncio.to_thread(recorded_place, run)  # first: rows that come meanwhile are read twice
        monitor.history = await asyncio.to_thread(History, read_records(run.metrics))
    events = StreamReader(bus, "EVENTS", bus.subject("events", "*"), after=place)
    while True:
        stopping = stop.is_set()
        await take_events(events, monitor)
        if stopping:
            break
        await set_within(stop, PERIOD_S)
    await _drain(statuses)


async def take_events(events: StreamReader, monitor: RunMonitor) -> None:
    """Give the monitor all events that are there; one that misses them for now is told at the next call."""
    while True:
        try:
            found = await events.take(BATCH)
        except BusError as error:  # the bus is away, or storage has not made the stream yet
            log.debug("events_not_read", reason=str(error))
            monitor.on_answer(isinstance(error.__cause__, nats.errors.NoRespondersError))
            return
        monitor.on_answer(True)
        for message in found:
            if (event := decoded_event(message)) is not None:
                monitor.on_event(event, message.time_s)
        if not found:
            return


async def _drain(subscription: Subscription) -> None:
    """Receive what was sent before now; a bus that is gone must not delay the end."""
    try:
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            await subscription.drain()
    except (TimeoutError, nats.errors.Error) as error:
        log.warning("last_statuses_not_heard", reason=str(error) or type(error).__name__)
