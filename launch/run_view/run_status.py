"""`launch status`: hears a live run for a moment, and asks its bus how it is, each question with a limit."""

import asyncio
import json
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import nats.errors
from nats.js.api import ConsumerInfo, StreamInfo
from nats.js.errors import NotFoundError

from bus.connection import Bus
from bus.connection.server_clock import server_clock
from bus.errors import BusAwayError, BusError, ConfigError, SchemaError
from bus.messages import PolicyManifest, RoleHolder, RunRecord, Status
from bus.requests import NOTHING_AFTER, StepGroups, StepGroupsRequest, StoredGroups, StoredRequest
from bus.streams.stream_reader import StreamPosition, StreamReader
from launch.run_view.monitor import RunMonitor, RunSettings, take_events
from launch.run_view.run_files import Waiting
from launch.run_view.units import since
from launch.settings.run_config import RunConfig, validate
from storage.disk.file_errors import lack_of_room
from storage.metrics.records import integer

CONNECT_S = 1.5
"""Longest time to wait for the bus."""
FIRST_S = 0.7
"""Longest time for the questions that the others follow from."""
LISTEN_S = 1.3
"""Time to listen; each process sends its status twice a second, and renews its role every second."""
RECENT_EVENTS = 48
"""Newest events that are searched for the learner's metrics."""
T = TypeVar("T")


@dataclass
class RunState:
    """What a live run said of itself within a moment; what is missing here did not answer."""

    monitor: RunMonitor
    """What the run's processes sent: their statuses, and the metrics of recent steps."""
    asked_s: float
    """Time of the first question, in seconds since the epoch."""
    config: RunConfig | None = None
    """Settings of the run; none before its storage has announced it."""
    settings_known: bool = True
    """Whether the bus said what is announced of the run, which may be nothing."""
    policy: PolicyManifest | None = None
    holders: dict[str, RoleHolder] = field(default_factory=dict)
    """Processes that hold a role of the run, alive or not."""
    roles_known: bool = True
    """Whether the bus said who holds the roles."""
    renewed: set[str] = field(default_factory=set)
    """Roles that their holder renewed meanwhile."""
    renewed_s: dict[str, float] = field(default_factory=dict)
    """Time at which each role was renewed last, in seconds since the epoch by this host's clock, as are all
    times here. The bus tells it by its own clock."""
    clock_ahead_s: float = 0.0
    """Seconds by which the bus's clock is ahead of this host's."""
    dispatcher: StepGroups | None = None
    shards: set[int] = field(default_factory=set)
    streams: dict[str, StreamInfo] = field(default_factory=dict)
    consumers: dict[str, ConsumerInfo] = field(default_factory=dict)
    """Consumers by stream and name, such as TASKS/rollout."""
    unanswered: list[str] = field(default_factory=list)
    """Questions that the bus itself did not answer."""
    full_disk: str = ""
    """What is wrong with the disk of the run's directory, where that is on this host and full."""

    def silent_since(self, role: str) -> str:
        """Return since when a role was not renewed, in words; nothing where that is not known."""
        return f"silent since {since(self.renewed_s[role], self.asked_s)}" if role in self.renewed_s else ""

    @property
    def trained_s(self) -> float | None:
        """Return when the bus got the figures of the newest step."""
        newest_s = self.monitor.newest_step_s
        return None if newest_s is None else newest_s - self.clock_ahead_s

    @property
    def leased_s(self) -> float | None:
        """Return when an actor took a lease last."""
        rollout = self.consumers.get("TASKS/rollout")
        taken = None if rollout is None or rollout.delivered is None else rollout.delivered.last_active
        return None if taken is None else taken.timestamp() - self.clock_ahead_s

    @property
    def run(self) -> str:
        return self.monitor.settings.name

    @property
    def statuses(self) -> dict[str, Status]:
        return {source: process.status for source, process in self.monitor.processes.items()}

    def of_role(self, role: str) -> list[Status]:
        return [status for status in self.statuses.values() if status.role == role]

    @property
    def waiting(self) -> Waiting | None:
        """Return what the learner has waited for longer than a minute."""
        found = self.monitor.values("learner").get("waiting")
        return Waiting.model_validate(found) if isinstance(found, dict) else None

    @property
    def state(self) -> str:
        """Return the state of the run, in the words of `RecordedRun`; `unseen` where no learner is heard."""
        learner = self.monitor.values("learner")
        if self.stage == "done":
            return "finished"
        if not self.of_role("learner"):
            return "unseen"
        if self.waiting is not None:
            return "waiting"
        return "training" if integer(learner, "step") or integer(learner, "warmup_step") else "starting"

    @property
    def stage(self) -> str:
        """Return the stage of the learner: starting, warmup, rl or done."""
        if self.policy is None or "stage" in self.monitor.values("learner"):
            return self.monitor.stage
        return self.policy.stage


async def look_at_run(where: RunConfig, stop: asyncio.Event) -> RunState:
    """Return the state of a run. Takes three seconds at most, whoever is away. Raises `BusAwayError` when the
    bus is, and `ConfigError` when it has no such run, or lets these credentials not hear everything: what
    they may not hear is not absent."""
    impatient = where.bus.model_copy(update={"connect_timeout_s": CONNECT_S, "patience_s": FIRST_S})
    async with Bus.connect(impatient, where.run, name="status", stop=stop) as bus:
        state = await _Questions(bus, where).ask()
    state.full_disk = await asyncio.to_thread(lack_of_room, where.directory / where.run)
    return state


class _Questions:
    """Asks everything about one run, at the same time where it can."""

    def __init__(self, bus: Bus, where: RunConfig) -> None:
        self._bus = bus
        self._state = RunState(RunMonitor(RunSettings.of_run(where)), time.time())

    async def ask(self) -> RunState:
        state, bus = self._state, self._bus
        heard = await bus.listen(bus.subject("status", "*"), Status, state.monitor.on_status)
        await self._within(FIRST_S, "the keys of the run", self._refuse_missing())
        if state.unanswered:
            raise BusAwayError(f"the bus accepts connections, but does not answer: {state.unanswered[0]}")
        before, asked = await asyncio.gather(
            self._within(FIRST_S, "the roles of the run", self._roles()),
            self._within(FIRST_S, "the settings of the run", self._settings()),
        )
        state.settings_known = asked is not None
        shards = state.config.replay.shards if state.config is not None else 0
        names = self._names(max(shards, 1))
        questions = [
            *(self._within(LISTEN_S, f"the stream {name}", self._stream(name)) for name in names),
            self._dispatcher(),
            *(self._shard(shard) for shard in range(shards)),
            asyncio.sleep(LISTEN_S),
        ]
        await asyncio.gather(*questions)
        after, _ = await asyncio.gather(
            self._within(FIRST_S, "the roles of the run", self._roles()),
            self._within(
                FIRST_S, "the policy", self._policy()
            ),  # last: nobody uses a newer version than this
        )
        state.roles_known = before is not None and after is not None
        if before is not None and after is not None:
            state.holders = {role: holder for role, (holder, _) in after.items()}
            state.renewed = {role for role, found in after.items() if found != before.get(role)}
            state.renewed_s = {role: at_s - state.clock_ahead_s for role, (_, at_s) in after.items()}
        await heard.unsubscribe()
        if bus.client.refusal:
            raise ConfigError(f"{bus.client.refusal}: name the credentials of a watcher with --creds")
        return state

    def _names(self, shards: int) -> Iterable[str]:
        prefix = f"{self._bus.topology.run}-"
        return (str(config.name).removeprefix(prefix) for config in self._bus.topology.streams(shards))

    async def _within(self, limit_s: float, what: str, work: Awaitable[T]) -> T | None:
        """Return what `work` does, or note that it did not end in time or was refused."""
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except (TimeoutError, BusError, SchemaError, nats.errors.Error) as error:
            self._state.unanswered.append(f"{what} ({str(error) or 'no answer'})")
            return None

    async def _refuse_missing(self) -> None:
        """Raise `ConfigError` for a run that this bus has never heard of."""
        clock = await server_clock(self._bus, FIRST_S)
        if clock is None:
            raise ConfigError(
                f"this bus has no run {self._state.run!r}: name another with --run, or its bus with --bus"
            )
        self._state.clock_ahead_s = clock.ahead_s

    async def _roles(self) -> dict[str, tuple[RoleHolder, float]]:
        """Return the holder of each role, and when it was renewed last by the bus's clock."""
        names = await self._bus.keys("role")
        found = await asyncio.gather(*(self._bus.get_written(name, RoleHolder) for name in names))
        return {
            name.removeprefix("role."): holder
            for name, holder in zip(names, found, strict=True)
            if holder is not None
        }

    async def _settings(self) -> bool:
        """Take over what storage has announced; return whether it has announced anything."""
        found = await self._bus.get("run", RunRecord)
        if found is not None:
            self._state.config = validate(json.loads(found[0].config_json))
            self._state.monitor.settings = RunSettings.of_run(self._state.config)
        return found is not None

    async def _policy(self) -> None:
        found = await self._bus.get("policy", PolicyManifest)
        self._state.policy = None if found is None else found[0]

    async def _stream(self, name: str) -> None:
        js, stream = self._bus.js, self._bus.topology.stream(name)
        try:
            found = await js.stream_info(stream)
        except NotFoundError:
            return  # storage has not made it yet
        self._state.streams[name] = found
        config = self._state.config
        shards = config.replay.shards if config is not None else 0
        durables = [
            str(consumer.durable_name)
            for owner, consumer in self._bus.topology.consumers(shards)
            if owner == name
        ]
        for durable, consumer in zip(
            durables, await asyncio.gather(*(js.consumer_info(stream, d) for d in durables)), strict=True
        ):
            self._state.consumers[f"{name}/{durable}"] = consumer
        if name == "EVENTS":
            newest = StreamPosition(max(0, found.state.last_seq - RECENT_EVENTS))
            events = StreamReader(self._bus, name, self._bus.subject("events", "*"), after=newest)
            await take_events(events, self._state.monitor)

    async def _dispatcher(self) -> None:
        subject, request = self._bus.subject("rpc", "step_groups"), StepGroupsRequest(step=0)
        try:
            answer = await self._bus.request(subject, request, StepGroups, timeout_s=LISTEN_S)
        except BusError:
            return
        self._state.dispatcher = answer

    async def _shard(self, shard: int) -> None:
        subject, request = self._bus.subject("rpc", "stored", shard), StoredRequest(after=NOTHING_AFTER)
        try:
            await self._bus.request(subject, request, StoredGroups, timeout_s=LISTEN_S)
        except BusError:
            return
        self._state.shards.add(shard)
