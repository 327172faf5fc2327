"""`launch storage`: the dispatcher of a run, and in the same process all of its replay shards or some."""

import asyncio
import json
import platform
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import nats.errors
import structlog
from nats.js.api import StreamState

from bus.codec import Json, decode
from bus.connection import Bus
from bus.connection.reporting_rate import tell_pace
from bus.connection.roles import guarded, hold_role
from bus.connection.status import Activity, report_status
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef, ModelFiles, PolicyManifest, Prompt, RunIdentity, RunRecord, Status, Wait
from bus.streams.blob_store import get_blob
from bus.streams.lost_data import OwnRecords, keep_streams
from bus.topology import ensure, trajectories_streams
from bus.waiting import RETRY_S, set_within
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.dispatch.absent_actors import REMEDY
from storage.dispatch.dispatcher import Counting, Dispatcher
from storage.ledger.ledger import Ledger
from storage.metrics.held_out_answers import HeldOutStore, keep_held_out_answers
from storage.metrics.recorder import Sink, record_metrics
from storage.model_files.packed_files import vocabulary_size
from storage.prompt_files.dataset import refuse_large
from storage.prompts.curriculum import SourceSuccess, report_sources
from storage.prompts.data_sets import DataSets
from storage.prompts.length_check import (
    check_lengths,
    check_measured,
    check_measured_prompts,
    check_prompt_lengths,
    lengths_exceeded,
    once,
)
from storage.prompts.run_prompts import Prompts, read_prompts
from storage.prompts.sampler import PickedPrompts, load_sampler
from storage.prompts.stream import PromptStream
from storage.prompts.supply import Supply
from storage.prompts.updates import DataUpdates, HeldoutBlobs
from storage.settings.admission import AdmissionConfig
from storage.settings.data import DataConfig
from storage.settings.evaluation import EvaluationSetConfig
from storage.settings.replay import ReplayConfig
from storage.shard.ingest_checks import RUN_ID, VOCABULARY, Quarantine
from storage.shard.server import Shard
from storage.shard.service import HeldShard, hold_shards, run_shard
from storage.store.kept_turns import turn_counts
from storage.store.retention import Retention
from storage.store.settled import refuse_older_ledger

log = structlog.get_logger()
QUEUES_PERIOD_S = 1.0
READY_PERIOD_S = 0.05
"""Time between two looks whether the dispatcher and the shards serve."""
LENGTHS_CHECKED = "lengths_checked"
"""Fact of the ledger: which prompts, for which model and length of answers, were found to fit."""


@dataclass(frozen=True)
class StorageSettings:
    """What the storage process of a run needs to know."""

    data: DataConfig
    admission: AdmissionConfig
    replay: ReplayConfig
    seed: int
    max_new_tokens: int
    run: RunDirectory
    config_json: str
    """The run's resolved configuration, for those who join by name."""
    model: Path | None = None
    """Model directory, if it is on this host: a new run's prompts are then checked before anything starts."""
    evaluation_sets: tuple[EvaluationSetConfig, ...] = ()
    """Data sets besides the held-out prompts."""
    shares_prefixes: bool = False
    """Whether the learner computes common beginnings once: what it computes is then counted by group."""
    counts_images: bool = False
    """Whether the images of each group are counted, for a learner whose balance of ranks is by work."""
    measures: bool = True
    """Whether held-out prompts are announced, for the learner to have answered."""
    kept_evaluations: int = 1
    """Number of evaluations of each data set whose answers are kept."""
    rolls_out: bool = True
    """Whether the run trains on answers to prompts, and not on demonstrations alone."""
    sinks: tuple[Sink, ...] = ()
    """Take each row of the run's metrics besides the files."""


async def run_storage(bus: Bus, settings: StorageSettings, stop: asyncio.Event) -> None:
    await bus.create_keys()
    incarnation = secrets.token_hex(4)
    # First of all: nobody joins any more by what an earlier dispatcher has announced.
    async with hold_role(bus, "dispatcher", incarnation) as renewing, AsyncExitStack() as opened:
        prompts = await asyncio.to_thread(
            read_prompts, settings.data, settings.run, settings.seed, settings.evaluation_sets,
            trained_on=settings.rolls_out,
        )  # fmt: skip
        largest = bus.client.max_payload
        await asyncio.to_thread(refuse_large, prompts.training, prompts.source, largest_message=largest)
        if settings.replay.numbers_here:
            await Retention.of_shard(settings.replay, settings.run.name).check()
        opening = asyncio.to_thread(Ledger.open, settings.run.ledger)  # a large ledger takes its time
        ledger = opened.enter_context(closing(await opening))
        if settings.model is not None:
            await asyncio.to_thread(check_measured_prompts, prompts.measured, settings.model)
        refuses = settings.rolls_out and settings.data.long_prompts == "refuse"
        if refuses and settings.model is not None and LENGTHS_CHECKED not in ledger.facts:
            await once(check_prompt_lengths, prompts.training, settings.model, settings.max_new_tokens)
        records = OwnRecords(bus)
        await _claim_streams(bus, records, ledger, settings.run)
        await _withdraw_other(bus, settings.config_json)
        _refuse_other_shards(ledger, settings.replay.shards)
        holding = hold_shards(bus, settings.run, settings.replay, settings.replay.numbers_here)
        held = await opened.enter_async_context(holding)
        _refuse_other_run(ledger, held)
        sets = DataSets(ledger, settings.run.data)
        await asyncio.to_thread(
            sets.configure,
            prompts.training,
            seed=settings.seed,
            shuffle=settings.data.shuffle,
            source=prompts.source,
            sources=prompts.sources,
            is_stream=settings.data.is_stream,
            is_picked=settings.data.sampler.function is not None,
        )
        created = await ensure(bus.js, bus.topology, settings.replay.shards)
        owned = _Owned(records, HeldoutBlobs(bus, records))
        await _announce(owned, settings, prompts, incarnation)
        service = _Service(bus, settings, sets, ledger, held, measured=prompts.measured, owned=owned)
        await guarded(service.run(stop, reissue="TASKS" in created), renewing)


async def _claim_streams(bus: Bus, records: OwnRecords, ledger: Ledger, run: RunDirectory) -> None:
    """Note on the bus whose its streams are. Raises `ConfigError` when they are another run's of this name.
    Its groups, rewards and weights would be taken for this run's: leases of both are numbered from 0."""
    if RUN_ID not in ledger.facts:
        ledger.set_fact(RUN_ID, secrets.token_hex(8))
        await asyncio.to_thread(ledger.flush)  # on the disk before the bus and the first lease have it
    identity = ledger.facts[RUN_ID]
    found = await bus.get("identity", RunIdentity)
    if found is not None and (other := found[0]).identity != identity:
        raise ConfigError(
            f"this bus has the streams of another run {run.name!r}, which is kept on {other.host} in "
            f"{other.directory}: choose another --run, or free them with `launch runs remove --run "
            f"{run.name} --bus ...`"
        )
    where = RunIdentity(identity=identity, host=platform.node(), directory=str(run.path.resolve()))
    await records.put("identity", where)


async def _withdraw_other(bus: Bus, config_json: str) -> None:
    """Remove the record that an earlier launch left with other settings: nobody may join by them any more."""
    found = await bus.get("run", RunRecord)
    if found is not None and found[0].config_json != config_json:
        await bus.delete("run")


@dataclass(frozen=True)
class _Owned:
    """What storage writes on the bus, and again when the bus loses it."""

    records: OwnRecords
    heldout: HeldoutBlobs


async def _announce(owned: _Owned, settings: StorageSettings, prompts: Prompts, incarnation: str) -> None:
    if prompts.heldout and settings.measures:
        await owned.heldout.put(prompts.heldout, f"held-out prompts ({settings.data.heldout})")
    for name, found in prompts.sets.items():
        await owned.heldout.put(found, f"evaluation.sets {name!r}", name)
    write_json(settings.run.config, json.loads(settings.config_json))
    record = RunRecord(name=settings.run.name, config_json=settings.config_json, announced_by=incarnation)
    await owned.records.put("run", record)


class _Service:
    def __init__(
        self, bus: Bus, settings: StorageSettings, data: DataSets, ledger: Ledger,
        held: list[HeldShard], *, measured: Mapping[str, Sequence[Prompt]], owned: _Owned,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._owned = owned
        self._settings = settings
        self._measured = measured
        self._data = data
        self._data_updates = DataUpdates(
            bus, ledger, data,
            max_new_tokens=settings.max_new_tokens, skip_long=settings.data.long_prompts == "skip",
        )  # fmt: skip
        self._ledger = ledger
        self._held = held
        self._queues: dict[str, Json] = {}
        curriculum, solved_at = settings.data.curriculum, settings.data.solved_at
        self._success = SourceSuccess(ledger, data, curriculum, solved_at=solved_at)
        self._dispatcher = Dispatcher(
            bus, ledger, data, settings.admission,
            shards=settings.replay.shards, seed=settings.seed, supply=self._supply(),
            counting=Counting(settings.shares_prefixes, settings.counts_images),
        )  # fmt: skip
        self._absent_actors = self._dispatcher.absent_actors
        self._retention = Retention.of_shard(settings.replay, settings.run.name)
        self._quarantine = Quarantine(self._dispatcher.facts)

    def _supply(self) -> Supply:
        data = self._settings.data
        if (sampler := load_sampler(data.sampler)) is not None:
            return PickedPrompts(self._ledger, self._data, sampler, seed=self._settings.seed)
        if data.prompts is None or not data.is_stream:
            return self._success
        return PromptStream(
            self._ledger, self._data, self._data_updates.check,
            source=data.prompts, keys=data.keys, directory=self._settings.run.data,
        )  # fmt: skip

    async def run(self, stop: asyncio.Event, *, reissue: bool) -> None:
        finished = asyncio.Event()
        await self._bus.listen(self._bus.subject("status", "actor"), Status, self._absent_actors.hear)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                report_status(
                    self._bus,
                    source="storage",
                    role="storage",
                    look=self._look,
                    stop=finished,
                    waits_for=self._waits_for,
                )
            )
            tasks.create_task(self._tell_when_ready(finished))
            tasks.create_task(self._watch_queues(finished))
            tasks.create_task(self._record(stop, finished))
            tasks.create_task(tell_pace(self._bus, finished))
            tasks.create_task(self._owned.records.keep(finished), name="keep the run's records")
            tasks.create_task(self._owned.heldout.keep(finished), name="keep held-out prompts")
            tasks.create_task(
                keep_streams(self._bus, self._settings.replay.shards, finished), name="keep the run's streams"
            )
            try:
                async with asyncio.TaskGroup() as parts:
                    for held in self._held:
                        shard = self._shard(held)
                        parts.create_task(run_shard(self._bus, held, shard, self._retention, stop))
                    parts.create_task(self._dispatcher.run(stop, reissue=reissue))
                    parts.create_task(self._admit_when_checked(stop))
                    parts.create_task(self._data_updates.run(stop))
                    parts.create_task(
                        keep_held_out_answers(
                            self._bus, HeldOutStore(self._settings.run.held_out_answers), stop,
                            evaluations=self._settings.kept_evaluations,
                        )
                    )  # fmt: skip
                    parts.create_task(
                        report_sources(self._bus, self._ledger, self._data, self._success, stop)
                    )
            finally:
                finished.set()

    async def _record(self, stop: asyncio.Event, finished: asyncio.Event) -> None:
        """Record the run's metrics; where that fails, have the others end as on `stop`. They are cancelled
        too, but one that just gets an answer of the bus may not notice that."""
        sinks = (*self._settings.sinks, self._absent_actors, self._dispatcher.engine_queues)
        try:
            await record_metrics(self._bus, self._settings.run, finished, sinks=sinks)
        except BaseException:
            stop.set()
            raise

    def _waits_for(self) -> str:
        if not self._dispatcher.serving:
            return "its dispatcher to serve"
        opening = {held.number for held in self._held}.intersection(self._dispatcher.awaited_shards)
        return f"its shards {sorted(opening)} to serve" if opening else ""

    async def _tell_when_ready(self, finished: asyncio.Event) -> None:
        while self._waits_for():
            if await set_within(finished, READY_PERIOD_S):
                return
        run, server = self._settings.run.name, self._bus.client.connected_url
        address = server.netloc.rpartition("@")[2] if server is not None else ""
        log.info("storage_ready", run=run, bus=address)

    def _shard(self, held: HeldShard) -> Shard:
        replay = self._settings.replay
        return Shard(
            self._bus,
            held.store,
            held.number,
            shards=replay.shards,
            was_issued=self._ledger.was_issued,
            linger_s=replay.linger_s,
            quarantine=self._quarantine,
        )

    async def _admit_when_checked(self, stop: asyncio.Event) -> None:
        """Wait for the learner's first version, check every prompt against its model, then let leases out."""
        while not stop.is_set():
            try:
                found = await self._bus.get("policy", PolicyManifest)
                if found is not None:
                    await self._check_lengths(found[0].model)
                    await check_measured(self._bus, found[0].model, self._measured)
                    await self._remember_vocabulary(found[0].model)
                    if self._settings.rolls_out:
                        self._dispatcher.admit()
                    return
            except BusError as error:  # away, or a new learner has just replaced the files
                log.warning("model_not_read", reason=str(error))
            await set_within(stop, RETRY_S)

    async def _check_lengths(self, model: BlobRef) -> None:
        """Once for the same prompts to train on and the same model: it takes long, and leases wait for it."""
        if not self._settings.rolls_out:
            return
        longest, skips = self._settings.max_new_tokens, self._settings.data.long_prompts == "skip"
        checked = json.dumps([self._data.latest.digest, model.digest, longest, *(["skip"] if skips else [])])
        if self._ledger.facts.get(LENGTHS_CHECKED) != checked:
            prompts = self._data.prompts
            if skips:
                found = await lengths_exceeded(self._bus, model, prompts, max_new_tokens=longest)
                self._data.skip_long(found)
            else:
                await check_lengths(self._bus, model, prompts, max_new_tokens=longest)
            self._ledger.set_fact(LENGTHS_CHECKED, checked)

    async def _remember_vocabulary(self, model: BlobRef) -> None:
        vocabulary = vocabulary_size(decode(await get_blob(self._bus, model), ModelFiles))
        if vocabulary is not None:
            self._ledger.set_fact(VOCABULARY, str(vocabulary))
            await asyncio.to_thread(self._ledger.flush)

    async def _watch_queues(self, finished: asyncio.Event) -> None:
        while not finished.is_set():
            try:
                streams = trajectories_streams(self._settings.replay.shards)
                states = [await self._stream_state(name) for name in streams]
                dead = await self._stream_state("DEAD", self._bus.subject("dead", ">"))
                kinds = {subject.rpartition(".")[2]: n for subject, n in (dead.subjects or {}).items()}
                self._queues = {
                    "tasks_pending": (await self._stream_state("TASKS")).messages,
                    "trajectories_pending": sum(state.messages for state in states),
                    "dead": dead.messages,
                    "dead_reasons": kinds,
                }
                await self._look_for_actors()
            except nats.errors.Error as error:  # the bus is away: only a screen misses this
                log.debug("queues_not_seen", reason=str(error))
            await set_within(finished, QUEUES_PERIOD_S)

    async def _stream_state(self, name: str, subjects: str | None = None) -> StreamState:
        return (await self._bus.js.stream_info(self._bus.topology.stream(name), subjects)).state

    async def _look_for_actors(self) -> None:
        leases = await self._bus.js.consumer_info(self._bus.topology.stream("TASKS"), "rollout")
        self._absent_actors.look(
            waiting_leases=leases.num_pending or 0,
            waiting_pulls=leases.num_waiting or 0,
            held_leases=leases.num_ack_pending or 0,
        )
        self._dispatcher.note_waiting(leases.num_pending or 0)

    def _look(self) -> Activity:
        doing, wait = self._doing()
        if wait != "shards" and (silent := sorted(self._dispatcher.silent_shards)):
            doing = f"{doing}; no answer from shards {_listed(silent)}"
        values: dict[str, Json] = {
            **asdict(self._ledger.account()),
            "reasons": dict(self._ledger.reasons),
            "prompts": self._data.latest.count,
            "prompts_quarantined": self._data.quarantined,
            "sources": {name: dict(figures) for name, figures in self._success.figures.items()},
            "closed_short": sum(held.store.closed_short for held in self._held),
            "late_siblings": sum(held.store.late_siblings for held in self._held),
            "trajectories_stored": sum(held.store.trajectories for held in self._held),
            **turn_counts(held.store.turns for held in self._held),
            "stored_bytes": sum(held.store.size_bytes for held in self._held),
            "shards_here": list(self._settings.replay.numbers_here),
            "shards_silent": [*sorted(self._dispatcher.silent_shards)],
            "late_rewards": dict(sum((held.store.rewards for held in self._held), Counter())),
            "max_staleness": self._settings.admission.max_staleness,
            "groups_waiting": self._dispatcher.waiting,
            "alarm": self._absent_actors.alarm,
            **self._queues,
        }
        return Activity(doing, values, wait=wait)

    def _doing(self) -> tuple[str, Wait]:
        policy, dispatcher = self._dispatcher.policy, self._dispatcher
        if awaited := dispatcher.awaited_shards:
            here = not set(awaited) - set(self._settings.replay.numbers_here)
            remedy = "" if here else ": start `launch shards`"
            return f"waiting for shards {_listed(awaited)}{remedy}", "shards"
        if absent_s := self._absent_actors.absent_s:
            return f"no actors for {absent_s / 60:.0f} min: {REMEDY}", ""
        if policy is None:
            return "waiting for the learner's first policy version", "policy"
        if policy.stage != "rl":
            return f"no rollouts wanted: the learner is in stage {policy.stage}", ""
        if dispatcher.waits_for_prompts:
            return dispatcher.waits_for_prompts, ""
        if room := dispatcher.room():
            return f"issuing {room} leases", ""
        if dispatcher.held_back:
            return dispatcher.held_back, "throttle"
        if self._settings.admission.ahead == "need":
            return "all that keeps the learner from waiting is rolling out or stored", "staleness"
        return "all that the staleness bound allows is rolling out or stored", "staleness"


def _listed(shards: Iterable[int]) -> str:
    return ", ".join(map(str, shards))


def _refuse_other_shards(ledger: Ledger, shards: int) -> None:
    """A group's shard follows from its number, so the number of shards stays what it was."""
    before = int(ledger.facts.get("shards", str(shards)))
    if before != shards:
        raise ConfigError(f"this run keeps its replay in {before} shards: set replay.shards = {before}")
    ledger.set_fact("shards", str(shards))


def _refuse_other_run(ledger: Ledger, shards: list[HeldShard]) -> None:
    """Groups of a lease that is yet to be issued would stand in the way of its own."""
    for held in shards:
        store, youngest, noted = held.store, held.store.youngest, held.store.settled
        refuse_older_ledger(
            ledger.name,
            str(store.directory),
            noted,
            issued=ledger.next_id,
            seen=int(ledger.facts.get(f"shard_{held.number}", "0")),
            again=filter(noted.covers, ledger.rolling_out),
        )
        if store.run not in ("", ledger.facts[RUN_ID]):
            raise ConfigError(
                f"{store.directory} holds segments of run {store.run}, and the ledger is of run "
                f"{ledger.facts[RUN_ID]}: restore the replay directory, or move both away to start a new run"
            )
        if youngest >= ledger.next_id:
            raise ConfigError(
                f"{store.directory} holds the group of lease {youngest}, but the ledger has issued only "
                f"{ledger.next_id}: restore the ledger, or move both away to start a new run"
            )
