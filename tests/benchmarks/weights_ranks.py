"""Tells what a publication costs each rank of a learner whose ranks share the model: `launch bench weights
--ranks N`.

Each rank trains, finds what changed of what it holds, and codes, hashes and stores its share of the published
tensors. Rank 0 announces over a real bus where all of it lies; a receiver fetches and applies it and compares
digests. The ranks talk by NCCL where each has a GPU, and by gloo otherwise. What
`--learner.parallel`, `--learner.backend` and `--learner.lora` say holds."""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import structlog
import torch
import torch.distributed as dist

from actors.weights.received import Receiver
from benchmarks.learner import trainer_of
from benchmarks.learner_workloads import Workload
from benchmarks.weights import FIRST, RUN, STEPS_BEFORE, on_a_bus, workload_of
from bus.codec import Json
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import TrainingError
from bus.messages import BlobRef
from bus.process.child_process import module_command
from launch.process.log_settings import configure_logging
from launch.services.learner import learner_settings
from launch.settings.run_config import RunConfig, validate
from learner.algorithms.losses.objective import Objective
from learner.backends.factory import close_world, init_world
from learner.config.loss import ReinforceLoss
from learner.config.publication import PublicationConfig
from learner.data.packing import pack
from learner.distributed.process_group import gathered
from learner.publication.host_copy import Copied
from learner.publication.publisher import WeightPublisher
from learner.publication.rank_tensors import OwnTensors
from learner.publication.tensor_encoder import TensorEncoder, Tensors
from learner.world.channel import Channel
from learner.world.rank import Rank
from learner.world.world import World
from storage.disk.atomic_files import Content
from storage.disk.run_directory import RunDirectory
from storage.weights.blob_sources import blob_source
from storage.weights.blob_stores import BlobStore, blob_store, chosen_transport
from storage.weights.deltas import EncodedTensors
from storage.weights.tensors import Weights

log = structlog.get_logger()
Figures = dict[str, float]


def bench_ranks(model: str | None, config: RunConfig, *, ranks: int, versions: int) -> dict[str, Json]:
    """Return medians over `versions` for each of so many ranks, which are started here."""
    asked = {"model": model, "config": config.model_dump_json(exclude_unset=True), "versions": versions}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--no-python", *module_command("benchmarks.weights_ranks", json.dumps(asked))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as world:
        try:
            said, _ = world.communicate()
        except BaseException:
            world.terminate()  # it ends the ranks
            raise
    if world.returncode:
        raise TrainingError(f"the ranks ended with status {world.returncode}: see above why")
    report: dict[str, Json] = json.loads(said.splitlines()[-1])
    return report


class TimedEncoder(TensorEncoder):
    """Notes how long the coding of a rank's tensors takes, and how many bytes come of it."""

    def __init__(self, config: PublicationConfig) -> None:
        super().__init__(config)
        self.figures: Figures = {}

    def encoded(
        self, base: Weights, tensors: Tensors, *, most_bytes: int = sys.maxsize
    ) -> EncodedTensors | None:
        began = time.perf_counter()
        found = super().encoded(base, tensors, most_bytes=most_bytes)
        bodies = found.bodies.values() if found is not None else ()
        self.figures = {
            "encode_s": time.perf_counter() - began,
            "coded_bytes": sum(len(part) for body in bodies for part in body),
            "share_bytes": sum(tensor.size_bytes for tensor in tensors.values()),
        }
        return found


class TimedStore:
    """Notes how long it takes to store what a rank has of a version, and its size."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.start, self.holds, self.delete, self.close = store.start, store.holds, store.delete, store.close
        self.figures: Figures = {}

    async def put(self, content: Content, *tokens: object) -> BlobRef:
        began = time.perf_counter()
        blob = await self._store.put(content, *tokens)
        self.figures = {"store_s": time.perf_counter() - began, "stored_bytes": blob.size_bytes}
        return blob


class MeasuredRank(Rank):
    """A rank that trains on random tokens and notes what its publications take."""

    store: TimedStore

    def measure(self, workload: Workload, config: PublicationConfig) -> None:
        """Train on this from now on, and code as `config` says."""
        self.encoder = TimedEncoder(config)
        self._tensors = OwnTensors(self.encoder, self._answers)
        self._workload, self._seed = workload, np.random.default_rng(1)
        self._wait_s = 0.0

    async def stored_at(self, bus: Bus, directory: Path) -> BlobStore:
        """Return the store of what this rank publishes."""
        configured = self._settings.learner.publication.transport
        transport = await chosen_transport(bus, configured, self._backend.size_bytes)
        self.store = TimedStore(blob_store(bus, transport, directory / "weights", dist.get_rank()))
        return self.store

    async def trained(self) -> None:
        """Train on tokens that have not been seen, as a run does."""
        samples = [
            replace(
                s, token_ids=self._seed.integers(0, self.hf_config.vocab_size, len(s.token_ids), np.int32)
            )
            for s in self._workload.samples()
        ]
        mine = pack(samples[self.share :: self.shares], self._workload.micro_batch)
        objective = Objective(ReinforceLoss())
        await self.in_thread(lambda: self._backend.train_step(mine, objective, policy_version=0))

    async def copied(self) -> Copied:
        """Copy the weights, and note for how long training waited on this rank."""
        began = time.perf_counter()
        found = await self.copy_weights()
        self._wait_s = time.perf_counter() - began
        return found

    async def figures(self) -> list[Figures]:
        """Return the figures of the version published last, by rank."""
        divided = self._host.divided
        of_dtypes = () if divided is None else divided._of_dtypes
        mine = {
            "wait_s": self._wait_s,
            **self.encoder.figures,
            **self.store.figures,
            "tensors_bytes": sum(each.nbytes for some in of_dtypes for each in some._sets),
            "compared_bytes": sum(chunk._kept.nbytes for some in of_dtypes for chunk in some._chunks),
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        }
        return await self.in_thread(lambda: gathered(mine))


def bus_of_rank_0(url: str = "") -> str:
    """Return the URL that rank 0 gives. Every rank calls this."""
    box = [url]
    dist.broadcast_object_list(box, 0)
    return box[0]


async def _measured(workload: Workload, config: RunConfig, directory: Path, versions: int) -> dict[str, Json]:
    stop, publication = asyncio.Event(), config.learner.publication
    settings, _ = learner_settings(config, RunDirectory(directory, "bench"))
    with ThreadPoolExecutor(1, "train") as thread:
        loop, learner = asyncio.get_running_loop(), config.learner
        backend = await loop.run_in_executor(
            thread,
            lambda: trainer_of(
                workload, learner.parallel, learner.backend, optimizer=learner.optimizer, lora=learner.lora
            ),
        )
        rank = MeasuredRank(backend, settings, reader=None, demonstrations=None, thread=thread)  # type: ignore[arg-type]  # nothing is read
        rank.measure(workload, publication)
        world = World(Channel(stop), rank, settings)
        if dist.get_rank() > 0:
            url = await rank.in_thread(bus_of_rank_0)
            async with (
                Bus.connect(BusConfig(url=url), RUN, name="rank") as bus,
                rank.publishing_to(await rank.stored_at(bus, directory)),
            ):
                await world.follow()
            return {}
        workload.model.save_pretrained(directory / "model")
        source = config.actors.weights
        async with on_a_bus(directory) as bus, world.led(stop), blob_source(bus, source) as blobs:
            await rank.in_thread(partial(bus_of_rank_0, str(bus.client.connected_url.geturl())))
            publisher = WeightPublisher(
                bus, await rank.stored_at(bus, directory), publication,
                incarnation="bench", base=rank.adapter_base,
                others=rank.other_ranks(lambda wish: world.send(Rank.fulfil, wish)),
            )  # fmt: skip
            publisher._encoder = rank.encoder
            await publisher.start(directory / "model")
            figures = await _published(world, publisher, Receiver(blobs), versions)
            await publisher.close()
    return figures


async def _published(
    world: World, publisher: WeightPublisher, receiver: Receiver, versions: int
) -> dict[str, Json]:
    by_rank: list[defaultdict[str, list[float]]] = [defaultdict(list) for _ in range(dist.get_world_size())]
    whole: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(STEPS_BEFORE):
        await world.call(MeasuredRank.trained)
    for version in range(versions + FIRST):
        await world.call(MeasuredRank.trained)
        copied = await world.call(MeasuredRank.copied)
        began = time.perf_counter()
        tensors = await copied.arrived()
        manifest = await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
        published = time.perf_counter()
        await receiver.advance(manifest)
        log.info("version_received", policy_version=version, counts=version >= FIRST)
        announced, received = publisher.announced(), receiver.weights
        if announced is None or received is None or received.digests != announced.digests:
            raise ValueError(f"version {version} was received with other weights than were published")
        found = await world.call(MeasuredRank.figures)
        if version >= FIRST:
            once = {"publish_s": published - began, "receive_s": time.perf_counter() - published}
            once |= {name: float(str(value)) for name, value in publisher.figures.items()}
            for values, figures in zip((whole, *by_rank), (once, *found), strict=True):
                for name, value in figures.items():
                    values[name].append(value)
    return {
        "ranks": dist.get_world_size(), "backend": dist.get_backend(), "cores": os.cpu_count(),
        **{name: statistics.median(values) for name, values in whole.items()},
        "by_rank": [{name: statistics.median(all_) for name, all_ in values.items()} for values in by_rank],
    }  # fmt: skip


def main() -> None:
    """Be one rank; rank 0 prints the figures as JSON."""
    configure_logging("info")
    asked = json.loads(sys.argv[1])
    config = validate(json.loads(asked["config"]), {"model": {"dtype": "bfloat16"}})
    init_world(config.learner.parallel, backend=config.learner.backend)
    workload = workload_of(asked["model"], config)
    workload = replace(workload, micro_batches=dist.get_world_size() * workload.micro_batches)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        found = asyncio.run(_measured(workload, config, Path(directory), asked["versions"]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)  # noqa: T201 - the process that started us reads it
    close_world()


if __name__ == "__main__":
    main()
