"""The processes of a publication by ranks, each of which can be killed.

They are two ranks of a learner that publish one version after another, storage, and actors that follow the
policy and pass weights on to each other."""

import asyncio
import faulthandler
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import structlog
import torch
import torch.distributed as dist

from actors.weights.follow import PolicyFollower
from bus.config import BusConfig
from bus.connection import Bus
from bus.connection.roles import guarded, hold_role
from bus.messages import PolicyManifest
from bus.topology import ensure
from learner.backends.contract.backend import NO_TENSORS, Exported, ExportedPiece
from learner.backends.factory import init_world
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.publication import PublicationConfig
from learner.publication.publisher import WeightPublisher
from learner.run.service import train_thread
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.settings.weights_transport import HttpTransport, PeerConfig
from storage.weights import blob_parts, blob_sources
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import blob_store
from storage.weights.swarm import Swarm
from tests.learner.mini_run import MiniRun
from tests.storage.serving import SHARDS, serving

RANKS = 2
NAMES = ("a", "b", "c", "d")
ROWS, COLUMNS = 64, 4096
EVERY = 4
"""A version changes every so many-th row."""
BLOCK_BYTES = 64 << 10
"""Parts of blobs are so small that a transfer has several."""
PUBLICATION = PublicationConfig(threads=1, snapshot_every=3, keep=3)
PRELOADED = ["tests.launch.chaos.publication_processes"]


@dataclass(frozen=True)
class Run:
    """Says where the processes of a run meet."""

    name: str
    url: str
    directory: Path
    creds: Path | None = None
    """Directory with credentials of each role, on a secured bus."""

    def connect(self, role: str, name: str) -> AbstractAsyncContextManager[Bus]:
        creds = None if self.creds is None else self.creds / f"{role}.creds"
        return Bus.connect(BusConfig(url=self.url, creds=creds), self.name, name=name)


def content(incarnation: str, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, which no other version and no other learner has."""
    life, found = int(incarnation.removeprefix("life-")), {}
    for number, name in enumerate(NAMES):
        found[name] = torch.empty(ROWS, COLUMNS)
        for first in range(EVERY):
            changed_at = max(0, version - (version + first + number) % EVERY)
            drawn = torch.Generator().manual_seed(hash((life, changed_at, number, first)) % (1 << 62))
            shape = found[name][first::EVERY].shape
            found[name][first::EVERY] = torch.randint(0, 250, shape, generator=drawn).float()
    return found


class PublishingRank(Rank):
    """A rank that has every second row of each weight."""

    async def become(self, incarnation: str, version: int) -> None:
        mine = [tensor[dist.get_rank() :: RANKS] for tensor in content(incarnation, version).values()]
        self._backend.rows.copy_(torch.cat(mine))


def publishing_rank(run: Run, thread: ThreadPoolExecutor) -> PublishingRank:
    starts = torch.arange(dist.get_rank(), ROWS, RANKS).repeat(len(NAMES)) * COLUMNS
    numbers = torch.arange(len(NAMES)).repeat_interleave(ROWS // RANKS)
    rows = torch.zeros(len(starts), COLUMNS)
    piece = ExportedPiece(rows, torch.float32, NAMES, numbers, starts)
    exported = Exported(dict.fromkeys(NAMES, (ROWS, COLUMNS)), {}, NO_TENSORS, pieces=[piece])
    group = SimpleNamespace(rank=dist.get_rank, size=dist.get_world_size)
    backend = SimpleNamespace(
        hf_config=None, data_parallel_group=group, size_bytes=0, exported=lambda: exported, rows=rows,
        adapters=None,
    )  # fmt: skip
    settings = replace(
        MiniRun(None, run.directory, None, run.directory / "none").settings(),
        model=ModelConfig(dtype="bfloat16"), learner=LearnerConfig(publication=PUBLICATION),
    )  # fmt: skip
    return PublishingRank(backend, settings, reader=None, demonstrations=None, thread=thread)


async def be_rank(run: Run, number: int, incarnation: str) -> None:
    """Publish versions without end, as `launch learner` does."""
    stop = asyncio.Event()
    with train_thread() as thread:
        rank = publishing_rank(run, thread)
        world = World(Channel(stop), rank, rank._settings)
        async with run.connect("learner", f"rank-{number}") as bus:
            store = blob_store(bus, HttpTransport(), run.directory / "weights", number)
            if number > 0:
                async with rank.publishing_to(store):
                    await world.follow()
                return
            async with hold_role(bus, "learner", incarnation) as renewing:
                publisher = WeightPublisher(
                    bus, store, PUBLICATION, incarnation=incarnation,
                    others=rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish)),
                )  # fmt: skip
                await publisher.start(run.directory / "model")
                async with world.led(stop), asyncio.TaskGroup() as tasks:
                    tasks.create_task(publisher.serve(stop))
                    tasks.create_task(publisher.keep_announced(stop))
                    await guarded(publish(bus, world, publisher, incarnation), renewing)


async def publish(bus: Bus, world: World, publisher: WeightPublisher, incarnation: str) -> None:
    """Publish from the version on that the learner before came to, or from one before it, as after a
    checkpoint."""
    found = await bus.get("policy", PolicyManifest)
    announced = found[0].policy_version if found is not None else 0
    for version in count(max(0, announced - int(incarnation[-1]) % 3)):
        await world.call(PublishingRank.become, incarnation, version)
        copied = await world.call(Rank.copy_weights)
        tensors = await copied.arrived()
        await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)


async def be_storage(run: Run, told: Connection) -> None:
    """Serve the run as storage does."""
    async with run.connect("storage", "storage") as bus:
        await bus.create_keys()
        await ensure(bus.js, bus.topology, SHARDS)
        async with serving(bus, run.directory / "storage", admit=False):
            told.send("up")
            await asyncio.Event().wait()


class CheckedEngine:
    """Has the weights that it was given, and takes them one after another."""

    policy_version = -1

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}

    async def load_weights(self, state: Mapping[str, torch.Tensor], policy_version: int) -> float:
        for name, tensor in state.items():
            self.state[name] = tensor.clone()
            await asyncio.sleep(0)
        self.policy_version = policy_version
        return 0.0

    def wrong(self, manifest: PolicyManifest) -> list[str]:
        """Return the tensors that it has of another version."""
        expected = content(manifest.incarnation, manifest.policy_version)
        assert expected.keys() == self.state.keys()
        return [name for name, t in expected.items() if not torch.equal(self.state[name], t.bfloat16())]


async def be_actor(run: Run, name: str, told: Connection) -> None:
    """Follow the policy; tell each version that the engine serves, which of its tensors are others, and how
    many bytes other actors had from here."""
    blob_sources.SMALL_BYTES = 0
    engine, stop = CheckedEngine(), asyncio.Event()

    async with run.connect("actor", name) as bus:
        swarm = Swarm(bus, PeerConfig(), machine=name)  # reads no file of the learner's

        def loaded(manifest: PolicyManifest) -> None:
            wrong, passed_on = engine.wrong(manifest), swarm._server.sent_bytes
            told.send((manifest.incarnation, manifest.policy_version, wrong, passed_on))

        await PolicyFollower(bus, engine, Blobs(bus, swarm), on_loaded=loaded).run(stop)


def _begin(run: Run, name: str) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    blob_parts.BLOCK_BYTES = BLOCK_BYTES
    output = (run.directory / f"{name}.log").open("a", buffering=1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(output))
    os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)


def rank_process(run: Run, number: int, port: int, incarnation: str) -> None:
    _begin(run, f"rank-{number}")
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    init_world(backend="fsdp")
    try:
        asyncio.run(be_rank(run, number, incarnation))
    finally:
        structlog.get_logger().error("rank_ended", exc_info=True)
        os._exit(1)  # its threads may wait for the rank that was killed


def storage_process(run: Run, told: Connection) -> None:
    _begin(run, "storage")
    asyncio.run(be_storage(run, told))


def actor_process(run: Run, name: str, told: Connection) -> None:
    _begin(run, name)
    asyncio.run(be_actor(run, name, told))


Main = Callable[..., None]


class Processes:
    """Starts processes that have all imported already; a context manager that ends them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._stack = ExitStack()

    def __enter__(self) -> "Processes":
        self.start(gc.collect).join()  # when all is imported
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, main: Main, *arguments: object) -> multiprocessing.process.BaseProcess:
        process = self._context.Process(target=main, args=arguments, daemon=True)
        process.start()
        self._stack.callback(kill, process)
        return process

    def started_with_pipe(
        self, main: Main, *arguments: object
    ) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self.start(main, *arguments, theirs)
        theirs.close()
        return process, ours


def kill(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join(60)
    assert process.exitcode is not None, f"{process} was killed and lives"
