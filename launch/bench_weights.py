"""What a publication costs, from a real learner's step to an engine that serves the new version.

`python -m launch.bench_weights` prints the figures as JSON. A learner trains at lr 1e-6 in bfloat16 and
publishes each step over a real bus to an engine that generates meanwhile. On CPU a small
Qwen3, on CUDA a Qwen3-0.6B; learner and engine share the machine, and on CUDA the device.
"""

import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from actors.config import EmbeddedEngineConfig
from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded import EmbeddedEngine
from actors.received import Receiver
from actors.weights import PolicyFollower
from bus.blobs import get_blob, put_blob
from bus.codec import Json
from bus.config import BusConfig
from bus.connection import Bus
from bus.publish import Publisher
from bus.server import NatsServer
from bus.topology import ensure
from learner.bench import OPTIMIZER, Workload, qwen3, qwen3_600m
from learner.config import PublicationConfig, TISLoss
from learner.host_copy import Copied, HostCopy, copy_weights
from learner.packing import pack
from learner.parallel import close_world, device, init_world
from learner.publish import WeightPublisher
from learner.trainer import Trainer
from storage.blob_sources import Blobs
from storage.blob_stores import BusBlobs

T = TypeVar("T")
RUN = "bench"
FIRST = 2
"""Versions that do not count: each makes one set of the learner's buffers."""
STEPS_BEFORE = 12
"""Adam's first steps move every weight by the whole learning rate, later ones by a third or less of it."""
SERVED_TIMEOUT_S = 300.0
TOKENS_AT_ONCE = 32
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
    """Of each version after the first, in seconds if the name does not say otherwise."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, figures: Mapping[str, Json], **seconds: float) -> None:
        """One more version."""
        wire, full, sent = (
            float(str(figures[f"weights/{name}"])) for name in ("wire_bytes", "full_bytes", "sent_fraction")
        )
        for name, value in {"wire_over_full": wire / full, "sent_fraction": sent, **seconds}.items():
            self.values[name].append(value)

    def median(self, name: str) -> float:
        """Over the versions."""
        return statistics.median(self.values[name])


class Learning:
    """A learner's step, and its weights on their way to the host; all torch work is on one thread."""

    def __init__(self, workload: Workload, thread: ThreadPoolExecutor) -> None:
        torch.manual_seed(0)
        state = Qwen3ForCausalLM(workload.model).state_dict()
        self._trainer = Trainer(workload.model, state, OPTIMIZER, dtype=workload.dtype)
        self._samples, self._micro_batch = workload.samples(), workload.micro_batch
        self._seed = np.random.default_rng(1)
        self._host, self._thread = HostCopy(torch.bfloat16), thread
        self._bare: list[Tensor] = []
        self.in_thread = _runner(thread)

    def step(self) -> None:
        """Train on tokens that have not been seen, as a run does."""
        vocabulary = self._trainer.hf_config.vocab_size
        fresh = [
            replace(s, token_ids=self._seed.integers(0, vocabulary, len(s.token_ids)).astype(np.int32))
            for s in self._samples
        ]
        batches = pack(fresh, self._micro_batch)
        self._trainer.train_step(batches, TISLoss(), temperature=1.0, policy_version=0)

    async def copy(self) -> Copied:
        """As the learner copies before it publishes."""
        return await copy_weights(self._host, self._trainer, self._thread)

    @property
    def copy_s(self) -> float:
        """Seconds of the latest copy."""
        return self._host.seconds

    def bare_copy_s(self) -> float:
        """Seconds that as many bytes take from the device to the host when nothing else is done."""
        weights = [p.detach() for chunk in self._trainer.chunks for p in chunk.parameters()]
        if not self._bare:
            self._bare = [torch.zeros(w.shape, dtype=w.dtype, pin_memory=w.is_cuda) for w in weights]
        _wait()
        began = time.perf_counter()
        for buffer, weight in zip(self._bare, weights, strict=True):
            buffer.copy_(weight, non_blocking=True)
        _wait()
        return time.perf_counter() - began


def medium() -> Workload:
    """Large enough that a copy of it leaves the caches, few enough tokens for a laptop."""
    return Workload(qwen3(768, 2304, 8, 12, 6, 64, 8192), torch.bfloat16, 64, 64, 1, rounds=0)


def bench_weights(workload: Workload | None = None, *, versions: int = 8) -> dict[str, Json]:
    """Ratios with their limits, and the absolute figures behind them: medians over `versions`."""
    if workload is None:
        cuda = torch.cuda.is_available()
        workload = replace(qwen3_600m(tokens=16384), micro_batches=1) if cuda else medium()
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with (
        tempfile.TemporaryDirectory(prefix="sluice-bench-") as made,
        ThreadPoolExecutor(1, thread_name_prefix="train") as thread,
    ):
        thread.submit(init_world).result()
        try:
            learning = thread.submit(Learning, workload, thread).result()
            return asyncio.run(_bench(learning, workload, Path(made), versions))
        finally:
            thread.submit(close_world).result()


async def _bench(learning: Learning, workload: Workload, directory: Path, versions: int) -> dict[str, Json]:
    async with _on_a_bus(directory) as bus, _serving(workload) as engine:
        config = PublicationConfig(anchor_every=1000, threads=_threads())
        publisher = WeightPublisher(bus, BusBlobs(bus), config, incarnation="bench")
        (directory / "model").mkdir()
        await publisher.start(directory / "model")
        follower, stop = PolicyFollower(bus, engine), asyncio.Event()
        following = asyncio.create_task(follower.run(stop))
        measured = await _train_and_publish(learning, publisher, follower, engine, versions)
        stop.set()
        await following
        absolute = await _transport_figures(bus, publisher)
        absolute |= {"late_join_s": await _seconds(lambda: _join(bus, publisher))}
    return _report(measured, absolute)


async def _train_and_publish(
    learning: Learning, publisher: WeightPublisher, follower: PolicyFollower, engine: EmbeddedEngine,
    versions: int,
) -> Measured:  # fmt: skip
    """The learner's loop as far as publication is concerned."""
    measured = Measured()
    for _ in range(STEPS_BEFORE):
        await learning.in_thread(learning.step)
    await learning.in_thread(learning.bare_copy_s)
    for version in range(versions + FIRST):
        await learning.in_thread(learning.step)
        bare_first = version % 2 == 0  # whichever copies second finds some of it in the caches
        bare = await learning.in_thread(learning.bare_copy_s) if bare_first else 0.0
        began = time.perf_counter()
        copied = await learning.copy()
        stall = time.perf_counter() - began
        tensors = await copied.arrived()
        bare = bare or await learning.in_thread(learning.bare_copy_s)
        async with _decoding(engine):
            serving = asyncio.create_task(_served(follower, version))
            began = time.perf_counter()
            await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
            published = time.perf_counter()
            served = await serving
        if version >= FIRST:
            measured.add(
                publisher.figures, pause=follower.pause_s, stall=stall, stall_over_copy=stall / bare,
                copy=learning.copy_s, bare_copy=bare, publish=published - began, serving=served - began,
            )  # fmt: skip
    return measured


async def _served(follower: PolicyFollower, version: int) -> float:
    """When the engine has the version."""
    async with asyncio.timeout(SERVED_TIMEOUT_S):
        await follower.at_least(version)
    return time.perf_counter()


async def _transport_figures(bus: Bus, publisher: WeightPublisher) -> dict[str, Json]:
    """How long bytes alone take, as many as a delta has and as many as all weights have."""
    if publisher.latest is None:
        raise RuntimeError("nothing was published")
    figures: dict[str, Json] = {}
    for name, size in (
        ("delta", publisher.latest.deltas[-1].blob.size_bytes),
        ("full", publisher.latest.snapshot.size_bytes),
    ):
        data = os.urandom(size)
        began = time.perf_counter()
        ref = await put_blob(bus, Publisher(bus), data, "raw", name)
        put = time.perf_counter()
        await get_blob(bus, ref)
        figures |= {f"raw_put_{name}_s": put - began, f"raw_get_{name}_s": time.perf_counter() - put}
        figures |= {f"{name}_bytes": size}
    return figures


async def _join(bus: Bus, publisher: WeightPublisher) -> None:
    if publisher.latest is None:
        raise RuntimeError("nothing was published")
    await Receiver(Blobs(bus)).anchored(publisher.latest)


@asynccontextmanager
async def _on_a_bus(directory: Path) -> AsyncIterator[Bus]:
    async with (
        NatsServer(directory / "nats") as server,
        Bus.connect(BusConfig(url=server.url), RUN, name="bench") as bus,
    ):
        await ensure(bus.js, bus.topology, shards=1)
        await bus.create_keys()
        yield bus


@asynccontextmanager
async def _serving(workload: Workload) -> AsyncIterator[EmbeddedEngine]:
    model = Qwen3ForCausalLM(workload.model).to(device(), torch.bfloat16)
    engine = EmbeddedEngine(model, EmbeddedEngineConfig(dtype="bfloat16", slots=4))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _decoding(engine: EmbeddedEngine) -> AsyncIterator[None]:
    """Generate inside, and nothing outside: a learner shares its interpreter with no engine."""

    async def generate(n: int) -> None:
        sampling = Sampling(max_new_tokens=TOKENS_AT_ONCE)
        while not enough.is_set():
            await engine.generate(GenerationRequest(f"bench-{n}", [1, 2, 3, n], sampling))

    enough = asyncio.Event()
    busy = [asyncio.create_task(generate(n)) for n in range(4)]
    try:
        yield
    finally:
        enough.set()
        await asyncio.gather(*busy)


def _report(measured: Measured, absolute: dict[str, Json]) -> dict[str, Json]:
    median, values = measured.median, measured.values
    full = float(str(absolute["full_bytes"]))
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
            "bare_copy_s": median("bare_copy"),
            "bare_copy_bytes_per_s": full / median("bare_copy"),
            "publish_s": median("publish"),
            **absolute,
        },
    }


async def _seconds(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def _runner(thread: ThreadPoolExecutor) -> "Callable[[Callable[[], T]], Awaitable[T]]":
    return lambda work: asyncio.get_running_loop().run_in_executor(thread, work)


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(bench_weights(), indent=2))  # noqa: T201 - the user's terminal
