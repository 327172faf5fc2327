"""`launch storage`: the dispatcher and the replay shards of a run, in one process."""

import asyncio
import secrets
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import nats.errors
import structlog

from bus.blobs import get_blob, put_blob
from bus.codec import Json, decode, encode
from bus.connection import RETRY_S, Bus
from bus.errors import BusError, ConfigError
from bus.messages import BlobRef, ModelFiles, PolicyManifest, Prompt, PromptSet, RunRecord
from bus.publish import Publisher
from bus.roles import guarded, hold_role
from bus.status import report_status
from bus.topology import ensure
from storage.config import AdmissionConfig, DataConfig, ReplayConfig
from storage.dispatcher import Dispatcher
from storage.generators import generate_task
from storage.ledger import Ledger
from storage.lengths import check_prompt_lengths
from storage.model_files import unbundle, vocabulary_size
from storage.prompts import PromptOrder, load_prompts
from storage.quarantine import RUN_ID, VOCABULARY, Quarantine
from storage.replay import ReplayStore
from storage.retention import Retention, keep_house
from storage.run import RunDirectory
from storage.shard import Shard

log = structlog.get_logger()
QUEUES_PERIOD_S = 1.0
_QUEUES = {"TASKS": "tasks_pending", "TRAJECTORIES": "trajectories_pending", "DEAD": "dead"}
"""Streams whose length is reported, and under which name."""


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


@dataclass(frozen=True)
class Prompts:
    """What a run trains on and measures with."""

    training: list[Prompt]
    heldout: list[Prompt]


def read_prompts(data: DataConfig, run: RunDirectory, seed: int) -> Prompts:
    """Load the prompt files, writing them first where the configuration names a task instead.

    Raises `ConfigError` for whatever is wrong with them.
    """
    training, heldout = data.prompts, data.heldout
    if training is None and data.task is not None:
        files = generate_task(data.task, run.data, seed=seed)
        training, heldout = files.prompts, heldout or files.heldout
    if training is None:
        raise ConfigError("no prompts: give --prompts FILE, or --data.task sort for a generated task")
    return Prompts(
        training=load_prompts(training, data.keys),
        heldout=load_prompts(heldout, data.keys) if heldout else [],
    )


async def run_storage(bus: Bus, settings: StorageSettings, stop: asyncio.Event) -> None:
    """Serve the run until `stop`."""
    # An append gives the GIL up some ninety times, and beside a busy loop gets it back only after this
    # interval: 489 ms an append at Python's default of 5 ms, 65 ms at this one.
    sys.setswitchinterval(0.0005)
    prompts = await asyncio.to_thread(read_prompts, settings.data, settings.run, settings.seed)
    await bus.create_keys()
    async with hold_role(bus, "dispatcher", secrets.token_hex(4)) as renewing:
        with ExitStack() as stack:
            ledger = stack.enter_context(closing(Ledger.open(settings.run.ledger)))
            _refuse_other_shards(ledger, settings.replay.shards)
            stores = [
                stack.enter_context(closing(ReplayStore.open(settings.run.replay(n))))
                for n in range(settings.replay.shards)
            ]
            _refuse_other_run(ledger, stores)
            created = await ensure(bus.js, bus.topology, settings.replay.shards)
            await _announce(bus, settings, prompts.heldout)
            service = _Service(bus, settings, prompts.training, ledger, stores)
            await guarded(service.run(stop, reissue="TASKS" in created), renewing)


async def _announce(bus: Bus, settings: StorageSettings, heldout: list[Prompt]) -> None:
    """What others need to join the run."""
    if heldout:
        prompts = encode(PromptSet(prompts=tuple(heldout)))
        await bus.put("heldout", await put_blob(bus, Publisher(bus), prompts, "heldout"))
    await bus.put("run", RunRecord(name=settings.run.name, config_json=settings.config_json))


class _Service:
    """The dispatcher, the shards and their status, run together."""

    def __init__(
        self, bus: Bus, settings: StorageSettings, prompts: list[Prompt], ledger: Ledger,
        stores: list[ReplayStore],
    ) -> None:  # fmt: skip
        self._bus = bus
        self._settings = settings
        self._prompts = prompts
        self._ledger = ledger
        self._stores = stores
        self._queues: dict[str, Json] = {}
        if RUN_ID not in ledger.facts:
            ledger.set_fact(RUN_ID, secrets.token_hex(8))  # on the disk before the first lease is published
        order = PromptOrder(len(prompts), settings.seed, settings.data.shuffle)
        self._dispatcher = Dispatcher(
            bus, ledger, prompts, order, settings.admission, shards=len(stores)
        )  # fmt: skip
        quarantine = Quarantine(ledger, self._dispatcher.look_at_policy)
        self._shards = [
            Shard(
                bus,
                store,
                n,
                shards=len(stores),
                was_issued=ledger.was_issued,
                linger_s=settings.replay.linger_s,
                quarantine=quarantine,
            )
            for n, store in enumerate(stores)
        ]

    async def run(self, stop: asyncio.Event, *, reissue: bool) -> None:
        finished = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                report_status(self._bus, source="storage", role="storage", look=self._look, stop=finished)
            )
            tasks.create_task(self._watch_queues(finished))
            try:
                async with asyncio.TaskGroup() as parts:
                    for shard in self._shards:
                        parts.create_task(shard.run(stop))
                    for store in self._stores:
                        house = keep_house(self._bus, store, _retention(self._settings), stop)
                        parts.create_task(house, name=f"keep {store.directory.name}")
                    parts.create_task(self._dispatcher.run(stop, reissue=reissue))
                    parts.create_task(self._admit_when_checked(stop))
            finally:
                finished.set()

    async def _admit_when_checked(self, stop: asyncio.Event) -> None:
        """Wait for the learner's first version, check every prompt against its model, then let leases out."""
        while not stop.is_set():
            try:
                found = await self._bus.get("policy", PolicyManifest)
                if found is not None:
                    await self._check_lengths(found[0].model)
                    self._dispatcher.admit()
                    return
            except BusError as error:  # away, or a new learner has just replaced the files
                log.warning("model_not_read", reason=str(error))
            try:
                async with asyncio.timeout(RETRY_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _check_lengths(self, model: BlobRef) -> None:
        """Check the prompts against the model, and remember its vocabulary."""
        files = decode(await get_blob(self._bus, model), ModelFiles)
        with tempfile.TemporaryDirectory(prefix="sluice-model-") as directory:
            await asyncio.to_thread(unbundle, files, Path(directory))
            await asyncio.to_thread(
                check_prompt_lengths,
                self._prompts,
                Path(directory),
                max_new_tokens=self._settings.max_new_tokens,
            )
            vocabulary = await asyncio.to_thread(vocabulary_size, Path(directory))
        if vocabulary is not None:
            self._ledger.set_fact(VOCABULARY, str(vocabulary))
            await asyncio.to_thread(self._ledger.flush)

    async def _watch_queues(self, finished: asyncio.Event) -> None:
        while not finished.is_set():
            try:
                for name, value in _QUEUES.items():
                    subjects = self._bus.subject("dead", ">") if name == "DEAD" else None
                    stream = self._bus.topology.stream(name)
                    state = (await self._bus.js.stream_info(stream, subjects)).state
                    self._queues[value] = state.messages
                    if name == "DEAD":
                        kinds = state.subjects or {}
                        self._queues["dead_reasons"] = {s.rpartition(".")[2]: n for s, n in kinds.items()}
            except nats.errors.Error as error:  # the bus is away: only a screen misses this
                log.debug("queues_not_seen", reason=str(error))
            try:
                async with asyncio.timeout(QUEUES_PERIOD_S):
                    await finished.wait()
            except TimeoutError:
                continue

    def _look(self) -> tuple[str, dict[str, Json]]:
        account = self._ledger.account()
        room = self._dispatcher.room()
        policy = self._dispatcher.policy
        doing = "waiting for the learner's first policy version"
        if policy is not None and policy.stage != "rl":
            doing = f"no rollouts wanted: the learner is in stage {policy.stage}"
        elif policy is not None:
            doing = f"issuing {room} leases" if room else "all that the staleness bound allows is rolling out"
        return doing, {
            **asdict(account),
            "reasons": dict(self._ledger.reasons),
            "trajectories_stored": sum(store.trajectories for store in self._stores),
            "late_rewards": dict(sum((store.rewards for store in self._stores), Counter())),
            "stored_bytes": sum(store.size_bytes for store in self._stores),
            "max_staleness": self._settings.admission.max_staleness,
            **self._queues,
        }


def _retention(settings: StorageSettings) -> Retention:
    """Of one shard."""
    replay = settings.replay
    return Retention(
        retain_bytes=None if replay.retain_bytes is None else replay.retain_bytes // replay.shards,
        retain_age_s=replay.retain_age_s,
        archive=None if replay.archive is None else f"{replay.archive.rstrip('/')}/{settings.run.name}",
    )


def _refuse_other_shards(ledger: Ledger, shards: int) -> None:
    """A group's shard follows from its number, so the number of shards stays what it was."""
    before = int(ledger.facts.get("shards", str(shards)))
    if before != shards:
        raise ConfigError(f"this run keeps its replay in {before} shards: set replay.shards = {before}")
    ledger.set_fact("shards", str(shards))


def _refuse_other_run(ledger: Ledger, stores: list[ReplayStore]) -> None:
    """Groups of a lease that is yet to be issued would stand in the way of its own."""
    for store in stores:
        youngest = max(store.completed, default=-1)
        if youngest >= ledger.next_id:
            raise ConfigError(
                f"{store.directory} holds the group of lease {youngest}, but the ledger has issued only "
                f"{ledger.next_id}: restore the ledger, or move both away to start a new run"
            )
