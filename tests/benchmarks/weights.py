"""Tells what a publication costs, from a real learner's step to an engine that serves the new version.

A learner trains at lr 1e-6 in bfloat16 and publishes each step over a real bus to an engine that generates
meanwhile. The engine shares the learner's device, unless a SGLang server is given another.

The figures of docs/performance.md on H200s with a Qwen3-0.6B (16k tokens a step, 64 requests in progress):

    launch bench weights --model qwen3-0.6b --actors.engine.type sglang \\
        --actors.engine.server.mem-fraction-static 0.4 --learner.publication.transport.type files \\
        --learner.publication.transport.directory /dev/shm/w --json

With a Qwen3-8B, whose server has a GPU of its own; `group` adds `--actors.engine.update group
--learner.publication.broadcast-device-bytes 11160000000`:

    launch bench weights --model qwen3-8b --versions 5 --actors.engine.type sglang \\
        --actors.engine.environment.CUDA_VISIBLE_DEVICES 1 --actors.engine.server.mem-fraction-static 0.6 \\
        --learner.batch.tokens-per-micro-batch 4096 --learner.parallel.recompute full \\
        --learner.optimizer.state-dtype bfloat16 --learner.publication.threads 32 \\
        --learner.publication.transport.type files --learner.publication.transport.directory /dev/shm/w --json

The copy of 1.2 GB takes at least 22 ms over PCIe, and that of 126 MB 8 to 20 ms on two cores.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import structlog
import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from actors.engines.base import Engine, GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.build import build_engine
from actors.engines.served_adapters import ServedAdapters, served_adapters
from actors.engines.sglang.server.settings import interpreter
from actors.settings.engines import EngineConfig
from actors.weights.follow import PolicyFollower
from actors.weights.received import Receiver
from benchmarks.learner_workloads import Workload, weights
from benchmarks.random_models import refuse_several
from benchmarks.run_bus import make_run
from benchmarks.weights_learner import Learning, medium, named
from bus.codec import Json
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.messages import BlobRef, PolicyManifest
from bus.process.process_tuning import few_collections
from bus.server.nats_server import NatsServer
from launch.settings.run_config import Layer, RunConfig, validate
from learner.backends.factory import close_world, init_world
from learner.distributed.process_group import device
from learner.publication.announcement import AdapterBase
from learner.publication.broadcast import Broadcaster
from learner.publication.publisher import WeightPublisher
from learner.publication.tensor_encoder import publishing_threads
from storage.weights.blob_sources import BlobSource, blob_source
from storage.weights.blob_stores import BlobStore, blob_store, chosen_transport

log = structlog.get_logger()
RUN = "bench"
FIRST = 2
"""Versions that do not count: each makes one set of the learner's buffers."""
STEPS_BEFORE = 12
"""Adam's first steps move every weight by the whole learning rate, later ones by a third or less of it."""
SERVED_TIMEOUT_S = 300.0
RANDOM_BYTES = 64 << 20
"""Repeated where more are sent: no transport compresses."""
LIMITS: dict[str, Json] = {  # at most
    "wire_over_full": 0.01,
    "pause_s": 0.3,
    "stall_over_copy": 1.1,
    "publish_to_serving_s": 3.0,
}
LIMITED_BY: dict[str, Json] = {
    "wire_over_full": "how many weights a step moves by one unit in the last place or more",
    "pause_s": "the decode step under way is over before the tensors are exchanged",
    "stall_over_copy": "memory or PCIe bandwidth; gathering and Hugging Face names are part of the stall",
    "publish_to_serving_s": "CPU: comparing, putting and getting, applying and hashing, in this order",
}


class Measured:
    """Measurements of each version after the first, in seconds if the name does not say otherwise."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.snapshots_s: list[float] = []
        """Durations of the snapshots that were written beside."""

    def add(self, figures: Mapping[str, Json], **seconds: float) -> None:
        """Add one more version."""
        wire, full, sent = (
            float(str(figures[f"weights/{name}"])) for name in ("wire_bytes", "full_bytes", "sent_fraction")
        )
        if "time/snapshot_s" in figures:
            self.snapshots_s.append(float(str(figures["time/snapshot_s"])))
        for name, value in {"wire_over_full": wire / full, "sent_fraction": sent, **seconds}.items():
            self.values[name].append(value)

    def median(self, name: str) -> float:
        """Over the versions."""
        return statistics.median(self.values[name])


class Following:
    """An engine that follows the policy, as long as it does."""

    def __init__(self, follower: PolicyFollower, running: asyncio.Task[None]) -> None:
        self._follower = follower
        self._running = running

    @property
    def pause_s(self) -> float:
        """Return the seconds that generation stood still for the latest version."""
        return self._follower.pause_s

    @property
    def receive_s(self) -> float:
        """Return the seconds until the latest version was here, verified."""
        return self._follower.receive_s

    async def served(self, version: int) -> float:
        """Wait until the engine has the version. Raises what ended the following, or `TimeoutError`."""
        serving = asyncio.create_task(self._follower.at_least(version))
        await asyncio.wait(
            {serving, self._running}, timeout=SERVED_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not serving.done():
            serving.cancel()
            if self._running.done():
                self._running.result()
            raise TimeoutError(f"version {version} was not served within {SERVED_TIMEOUT_S:g} s")
        return time.perf_counter()


def settings(*layers: Layer) -> RunConfig:
    """Return the settings of learner and engine; the last layer wins. Raises `ConfigError` for wrong ones."""
    engine = {"type": "embedded", "dtype": "bfloat16", "slots": 4}
    config = validate({"actors": {"engine": engine}}, *layers)
    if config.actors.engine.type == "sglang":
        refuse_several(config.actors.engine)
    return config


def workload_of(model: str | None, config: RunConfig) -> Workload:
    """Return the workload of the model with this name; without one, of a small one or Qwen3-0.6B on CUDA."""
    if model is None and not torch.cuda.is_available():
        return medium()
    return named(model or "qwen3-0.6b", config.learner.batch.token_budget)


def bench_weights(workload: Workload, config: RunConfig, *, versions: int = 12) -> dict[str, Json]:
    """Ratios with their limits, and the absolute figures behind them: medians over `versions`."""
    if config.actors.engine.type == "sglang" and config.actors.engine.url is None:
        interpreter(config.actors.engine)  # before the model takes its time
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as made,
        ThreadPoolExecutor(1, thread_name_prefix="train") as thread,
    ):
        thread.submit(init_world).result()
        try:
            return asyncio.run(_bench(workload, config, thread, Path(made), versions))
        finally:
            thread.submit(close_world).result()


async def _bench(
    workload: Workload, config: RunConfig, thread: ThreadPoolExecutor, directory: Path, versions: int
) -> dict[str, Json]:
    publication, by_group = config.learner.publication, _by_group(config.actors.engine)
    model = directory / "model"
    workload.model.save_pretrained(model)
    preparing = asyncio.wrap_future(thread.submit(Learning, workload, config.learner, thread))
    served = None
    if config.actors.engine.type == "embedded":  # made in this process: it sets torch's defaults meanwhile
        await preparing
    elif config.actors.engine.adapter == "loaded":
        served = _served(config, (await preparing).adapter_base)
    async with (
        on_a_bus(directory) as bus,
        blob_source(bus, config.actors.weights) as blobs,
        _serving(model, config.actors.engine, directory, served) as engine,
    ):
        learning = await preparing
        size = int(weights(workload.model)) * torch.bfloat16.itemsize
        transport = await chosen_transport(bus, publication.transport, size)
        store = blob_store(bus, transport, directory / "weights")
        publisher = WeightPublisher(bus, store, publication, incarnation="bench", base=learning.adapter_base)
        await publisher.start(model)
        broadcaster = Broadcaster(
            bus, publisher.announced, incarnation="bench",
            timeout_s=publication.broadcast_timeout_s, threads=publishing_threads(publication),
            device_bytes=publication.broadcast_device_bytes, hashed=publication.broadcast_digests,
        )  # fmt: skip
        await broadcaster.start()
        log.info("learner_ready", weights=weights(workload.model))
        serving = PolicyFollower(bus, engine, blobs, from_learner=by_group, served=served)
        stop = asyncio.Event()
        following = asyncio.create_task(serving.run(stop))
        with few_collections():  # as a learner and actors are
            measured = await _train_and_publish(
                learning, publisher, Following(serving, following), engine, versions
            )
        stop.set()
        await following
        await publisher.snapshots_written()
        absolute = await _transport_figures(store, blobs, publisher)
        absolute |= {"late_join_s": await _seconds(lambda: _join(blobs, publisher))}
        await broadcaster.close()
        await publisher.close()
    return _report(measured, absolute)


async def _train_and_publish(
    learning: Learning, publisher: WeightPublisher, following: Following, engine: Engine, versions: int
) -> Measured:  # fmt: skip
    """Run the learner's loop as far as publication is concerned."""
    measured = Measured()
    for step in range(STEPS_BEFORE):
        await learning.in_thread(learning.step)
        log.info("step_trained", step=step + 1, before_measuring=STEPS_BEFORE)
    await learning.in_thread(learning.bare_copy_s)
    for version in range(versions + FIRST):
        await learning.in_thread(learning.step)
        bare_first = version % 2 == 0  # whichever copies second finds some of it in the caches
        bare = await learning.in_thread(learning.bare_copy_s) if bare_first else 0.0
        began = time.perf_counter()
        copied = await learning.copy()
        stall = time.perf_counter() - began
        tensors = await copied.arrived()
        arrived = time.perf_counter() - began
        bare = bare or await learning.in_thread(learning.bare_copy_s)
        async with _decoding(engine):
            serving = asyncio.create_task(following.served(version))
            began = time.perf_counter()
            await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
            published = time.perf_counter()
            served = await serving
        log.info(
            "version_served", policy_version=version, counts=version >= FIRST,
            pause_s=round(following.pause_s, 4), publish_s=round(published - began, 3),
            receive_s=round(following.receive_s, 3), publish_to_serving_s=round(served - began, 3),
            stall_s=round(stall, 4), arrived_s=round(arrived, 4), bare_copy_s=round(bare, 4),
        )  # fmt: skip
        if version >= FIRST:
            measured.add(
                publisher.figures, pause=following.pause_s, stall=stall, stall_over_copy=stall / bare,
                copy=learning.copy_s, arrived=arrived, bare_copy=bare,
                publish=published - began, receive=following.receive_s, serving=served - began,
            )  # fmt: skip
    return measured


async def _transport_figures(
    store: BlobStore, blobs: BlobSource, publisher: WeightPublisher
) -> dict[str, Json]:
    """Return how long bytes alone take, as many as a delta and as a snapshot have."""
    manifest = _published(publisher)
    figures: dict[str, Json] = {}
    sizes = {"snapshot": manifest.snapshot.size_bytes}
    if manifest.deltas:
        sizes["delta"] = manifest.deltas[-1].blob.size_bytes
    for name, size in sizes.items():
        data = (os.urandom(min(size, RANDOM_BYTES)) * (size // RANDOM_BYTES + 1))[:size]
        began = time.perf_counter()
        ref = await store.put([data], "raw", name)
        put = time.perf_counter()
        await blobs.get(ref)
        figures |= {f"raw_put_{name}_s": put - began, f"raw_get_{name}_s": time.perf_counter() - put}
        figures |= {f"{name}_bytes": size}
        await store.delete(ref)
    return figures


async def _join(blobs: BlobSource, publisher: WeightPublisher) -> None:
    await Receiver(blobs).from_snapshot(_published(publisher))


def _published(publisher: WeightPublisher) -> PolicyManifest:
    if publisher.latest is None:
        raise RuntimeError("the learner published nothing, so nothing can be measured")
    return publisher.latest


@asynccontextmanager
async def on_a_bus(directory: Path) -> AsyncIterator[Bus]:
    """Connect to a server of its own, with the streams and keys of a run."""
    async with (
        NatsServer(directory / "nats") as server,
        Bus.connect(BusConfig(url=server.url), RUN, name="bench") as bus,
    ):
        await make_run(bus)
        yield bus


@asynccontextmanager
async def _serving(
    model: Path, config: EngineConfig, directory: Path, served: ServedAdapters | None
) -> AsyncIterator[Engine]:
    if config.type == "embedded":  # on the learner's device
        policy = Qwen3ForCausalLM._from_config(
            AutoConfig.from_pretrained(model, trust_remote_code=False), dtype=getattr(torch, config.dtype)
        )
        engine: Engine = EmbeddedEngine(policy.to(device()), config)
    else:
        engine = build_engine(config, model, directory / "engine.log", served=served)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def _served(config: RunConfig, base: AdapterBase | None) -> ServedAdapters | None:
    """Return the adapters that the engine adds itself, before any are published."""
    nowhere = BlobRef(subject="", chunks=0, size_bytes=0, digest="")
    adapted = None if base is None else base.described([nowhere], "")
    return served_adapters(config.actors.engine, adapted, max_staleness=config.admission.max_staleness)


def _by_group(config: EngineConfig) -> bool:
    return config.type == "sglang" and config.update == "group"


@asynccontextmanager
async def _decoding(engine: Engine) -> AsyncIterator[None]:
    """Generate inside, and nothing outside: a learner shares its interpreter with no engine."""
    at_once, tokens = (4, 32) if isinstance(engine, EmbeddedEngine) else (64, 256)

    async def generate(n: int) -> None:
        sampling = Sampling(max_new_tokens=tokens)
        for round_ in count():
            await engine.generate(GenerationRequest(f"bench-{n}-{round_}", [1, 2, 3, n], sampling))
            if enough.is_set():
                return

    enough = asyncio.Event()
    busy = [asyncio.create_task(generate(n)) for n in range(at_once)]
    try:
        yield
    finally:
        enough.set()
        await asyncio.gather(*busy)


def _report(measured: Measured, absolute: dict[str, Json]) -> dict[str, Json]:
    median, values = measured.median, measured.values
    copied = float(str(absolute["snapshot_bytes"]))
    return {
        "ratios": {
            "wire_over_full": median("wire_over_full"),
            "pause_s": max(values["pause"]),
            "stall_over_copy": median("stall_over_copy"),
            "publish_to_serving_s": median("serving"),
        },
        "limits": LIMITS,
        "limited_by": LIMITED_BY,
        "absolute": {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "cores": os.cpu_count(),
            "sent_fraction": median("sent_fraction"),
            "stall_s": median("stall"),
            "copy_s": median("copy"),
            "arrived_s": median("arrived"),
            "bare_copy_s": median("bare_copy"),
            "bare_copy_bytes_per_s": copied / median("bare_copy"),
            "publish_s": median("publish"),
            "worst_publish_s": max(values["publish"]),
            "snapshots_s": list(measured.snapshots_s),
            "receive_s": median("receive"),
            "median_pause_s": median("pause"),
            **absolute,
        },
    }


async def _seconds(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began
