"""`launch storage`: the dispatcher and the replay shards of a run, in one process."""

import asyncio
import secrets
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from bus.blobs import get_blob, put_blob
from bus.codec import Json, decode, encode
from bus.connection import RETRY_S, Bus
from bus.errors import ConfigError
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
from storage.prompts import PromptOrder, load_prompts
from storage.replay import ReplayStore
from storage.run import RunDirectory
from storage.shard import Shard

log = structlog.get_logger()
QUEUES_PERIOD_S = 1.0


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
    """Serve the run until `stop` or until its learner is done."""
    prompts = await asyncio.to_thread(read_prompts, settings.data, settings.run, settings.seed)
    await bus.create_keys()
    async with hold_role(bus, "dispatcher", secrets.token_hex(4)) as renewing:
        created = await ensure(bus.js, bus.topology, settings.replay.shards)
        if prompts.heldout:
            heldout = encode(PromptSet(prompts=tuple(prompts.heldout)))
            await bus.put("heldout", await put_blob(bus, Publisher(bus), heldout, "heldout"))
        await bus.put("run", RunRecord(name=settings.run.name, config_json=settings.config_json))
        with ExitStack() as stack:
            ledger = stack.enter_context(closing(Ledger.open(settings.run.ledger)))
            _refuse_other_shards(ledger, settings.replay.shards)
            stores = [
                stack.enter_context(closing(ReplayStore.open(settings.run.replay(n))))
                for n in range(settings.replay.shards)
            ]
            service = _Service(bus, settings, prompts.training, ledger, stores)
            await guarded(service.run(stop, reissue="TASKS" in created), renewing)


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
        order = PromptOrder(len(prompts), settings.seed, settings.data.shuffle)
        self._dispatcher = Dispatcher(
            bus, ledger, prompts, order, settings.admission, shards=len(stores)
        )  # fmt: skip
        self._shards = [
            Shard(bus, store, n, linger_s=settings.replay.linger_s) for n, store in enumerate(stores)
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
                    parts.create_task(self._dispatcher.run(stop, reissue=reissue))
                    parts.create_task(self._admit_when_checked(stop))
            finally:
                finished.set()

    async def _admit_when_checked(self, stop: asyncio.Event) -> None:
        """Wait for the learner's first version, check every prompt against its model, then let leases out."""
        while not stop.is_set():
            found = await self._bus.get("policy", PolicyManifest)
            if found is not None:
                await self._check_lengths(found[0].model)
                self._dispatcher.admit()
                return
            try:
                async with asyncio.timeout(RETRY_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _check_lengths(self, model: BlobRef) -> None:
        files = decode(await get_blob(self._bus, model), ModelFiles)
        with tempfile.TemporaryDirectory(prefix="sluice-model-") as directory:
            for name, content in zip(files.names, files.contents, strict=True):
                (Path(directory) / Path(name).name).write_bytes(content)
            await asyncio.to_thread(
                check_prompt_lengths,
                self._prompts,
                Path(directory),
                max_new_tokens=self._settings.max_new_tokens,
            )

    async def _watch_queues(self, finished: asyncio.Event) -> None:
        while not finished.is_set():
            for name in ("TASKS", "TRAJECTORIES", "DEAD"):
                state = (await self._bus.js.stream_info(self._bus.topology.stream(name))).state
                self._queues[f"{name.lower()}_pending" if name != "DEAD" else "dead"] = state.messages
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
            "stored_bytes": sum(store.size_bytes for store in self._stores),
            "max_staleness": self._settings.admission.max_staleness,
            **self._queues,
        }


def _refuse_other_shards(ledger: Ledger, shards: int) -> None:
    """A group's shard follows from its number, so the number of shards stays what it was."""
    before = int(ledger.facts.get("shards", str(shards)))
    if before != shards:
        raise ConfigError(f"this run keeps its replay in {before} shards: set replay.shards = {before}")
    ledger.set_fact("shards", str(shards))
