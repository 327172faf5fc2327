"""Tells how long many hosts take from the announcement of a version until they have it, beside what the cost
model says: the real publisher, swarm and receivers, in processes whose links are paced."""

import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import aiohttp
import numpy as np

from actors.weights.received import Receiver
from benchmarks.scale_model import Machine, Work, received_s, version_s
from benchmarks.swarm import PACKAGES, RUN, TIMEOUT_S, serving
from bus.codec import Json
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.messages import BlobRef, PolicyManifest
from learner.config.publication import PublicationConfig
from learner.publication.publisher import WeightPublisher
from learner.publication.rank_tensors import OtherRanks as OfPublisher
from learner.publication.rank_tensors import Share, StoredSnapshot
from learner.publication.tensor_encoder import TensorEncoder, Tensors
from storage.disk.atomic_files import Data
from storage.settings.weights_transport import HttpTransport, PeerConfig
from storage.weights import blob_http, blob_parts, blob_sources, part_tracker, swarm
from storage.weights.blob_http import HttpBlobs
from storage.weights.blob_parts import part_range
from storage.weights.blob_sources import Blobs
from storage.weights.tensors import HostTensor, RemoteTensor, Weights, snapshot_content

DONE = "bench.done"
"""Subject on which hosts say what they have."""
DIGEST_BYTES_PER_S = 1.26e9
MODELS = {"8B": (16.4e9, 8), "32B": (65.5e9, 16), "235B": (470e9, 64)}
"""Bytes of weights in bfloat16, and ranks of the learner, of which a host has 8."""
MODEL_RUNS = 20
"""Runs of the model, which draws the order of parts as the tracker does."""
LINKS = {"100 Gb/s": 12.5e9, "400 Gb/s": 50e9}
WAITS = {
    swarm: ("POLL_S", "ASK_S"),
    part_tracker: ("BUSY_S", "SILENT_S", "SLOW_S"),
}  # fmt: skip
"""Constants of the product, in seconds, that decide who sends what to whom."""


@dataclass(frozen=True)
class Scale:
    """A simulated cluster: sizes and bandwidths are scaled down, the number of parts is not.

    `slower` is the factor by which links and the product's waits are slower than they are said to be: all
    happens as it would, and the processor time of many processes on one machine is a small part of it."""

    hosts: int
    ranks: int
    size_bytes: int
    part_bytes: int
    link_bytes_per_s: float
    slower: float = 1.0

    @property
    def paced_bytes_per_s(self) -> int:
        return max(1, int(self.link_bytes_per_s / self.slower))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have this process use parts of this size, and such waits."""
        values: dict[tuple[ModuleType, str], object] = {
            (blob_parts, "BLOCK_BYTES"): self.part_bytes,
            (blob_sources, "SMALL_BYTES"): 0,
            (blob_http, "BOUNDED_BYTES"): max(1, self.part_bytes // 8),  # readers of a server share its link
        }
        for module, names in WAITS.items():
            values |= {(module, name): self.slower * getattr(module, name) for name in names}
        patient = aiohttp.ClientTimeout(total=self.slower * TIMEOUT_S)  # no host is to fail here
        values |= {(swarm, "TIMEOUT"): patient, (swarm, "_peer_timeout"): lambda _: patient}
        with ExitStack() as stack:
            for (module, name), value in values.items():
                stack.enter_context(patch.object(module, name, value))
            yield


class Downlink:
    """Parts arrive one after another, each when a link of this bandwidth would have delivered it."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_s = 0.0

    async def fetch_part(
        self,
        session: aiohttp.ClientSession,
        url: str,
        ref: BlobRef,
        part: int,
        data: memoryview,
        **named: Any,
    ) -> None:
        """Fetch a part as the product does, and wait for the link."""
        began = time.monotonic()
        await blob_http.fetch_part(session, url, ref, part, data, **named)
        begin, end = part_range(ref, part)
        self._due_s = max(self._due_s, began) + (end - begin) / self._bytes_per_s
        await asyncio.sleep(self._due_s - time.monotonic())


class OtherRanks:
    """Ranks of a learner beside rank 0, as its publisher sees them; all are in this process."""

    def __init__(self, stores: Sequence[HttpBlobs], encoder: TensorEncoder) -> None:
        self._stores, self._encoder = stores, encoder
        self._base: Sequence[Tensors] = []
        self._newest: Sequence[Tensors] = []

    def begin(self, tensors: Sequence[Tensors]) -> None:
        """Have these next, by rank."""
        self._base, self._newest = self._newest, tensors

    def with_theirs(self, mine: Tensors, _encoder: TensorEncoder, _version: int) -> Tensors:
        theirs = (each for some in self._newest for each in some.items())
        return {**mine, **{name: RemoteTensor(one.dtype, one.shape, _unread) for name, one in theirs}}

    async def encoded(self, version: int, most_bytes: int, tokens: tuple[object, ...]) -> list[Share]:
        found = []
        for store, base, newest in zip(self._stores, self._base, self._newest, strict=True):
            encoded = self._encoder.encoded(Weights(version, base, {}), newest, most_bytes=most_bytes)
            assert encoded is not None
            blob = await store.put(encoded.content, *tokens)
            found.append(Share(replace(encoded, bodies={}), (blob,)))
        return found

    async def snapshot(self, version: int, tokens: tuple[object, ...]) -> StoredSnapshot:
        digests, blobs = dict[str, bytes](), []
        for store, newest in zip(self._stores, self._newest, strict=True):
            digests |= (mine := self._encoder.digests(newest))
            blobs.append(await store.put(snapshot_content(Weights(version, newest, mine)), *tokens))
        return StoredSnapshot(digests, tuple(blobs))

    async def hold_all(self, _blobs: set[BlobRef]) -> bool:
        return True

    async def retire(self, _needed: set[BlobRef]) -> None:
        """Keep all until the end."""


def _unread(_start: int, _stop: int) -> Data:
    raise ValueError("rank 0 fetches no tensors of others")


class TimedBlobs:
    """Notes when a blob was there last."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.fetched_s = 0.0

    async def get(self, ref: BlobRef) -> Data:
        data = await self._blobs.get(ref)
        self.fetched_s = time.monotonic()
        return data


def predictions(hosts: int, loops: Mapping[str, float]) -> dict[str, Json]:
    """Return what the model says of real sizes and links, in seconds; event loops take what `loops` says."""
    found: dict[str, Json] = {}
    for link, bytes_per_s in LINKS.items():
        for model, (size_bytes, ranks) in MODELS.items():
            machine = Machine(
                bytes_per_s, **loops, times_tracker=True, digest_bytes_per_s=DIGEST_BYTES_PER_S,
                ranks=ranks, ranks_of_a_host=8,
            )  # fmt: skip
            stages = version_s(machine, Work(), hosts, int(size_bytes))
            found[f"{model}, {link}"] = {
                name: round(seconds, 3 if name == "wait_s" else 2) for name, seconds in stages.items()
            }
    return found


async def bench_scale(
    scale: Scale, loops: Mapping[str, float], *, versions: int, rounds: int
) -> list[dict[str, Json]]:
    """Return what the first version of a learner and later ones took to all hosts, measured in each of so
    many rounds, and by the model, whose event loops take what `loops` says."""
    found: list[list[dict[str, float]]] = [[] for _ in range(versions + 1)]
    with scale.applied(), tempfile.TemporaryDirectory(prefix="sluice-bench-") as made:
        async with (
            serving(bytes_per_s=scale.paced_bytes_per_s) as (bus, store),
            _other_stores(bus, scale, Path(made)) as others,
            _hosts(bus, scale) as said,
        ):
            (Path(made) / "config.json").write_text("{}")
            for round_ in range(rounds):
                config, stores = PublicationConfig(snapshot_every=1000), [store, *others]
                ranks = OtherRanks(others, TensorEncoder(config))
                publisher = WeightPublisher(
                    bus, store, config, incarnation=str(round_),
                    others=cast(OfPublisher, ranks) if others else None,
                )  # fmt: skip
                await publisher.start(Path(made))
                for version, figures in enumerate(found):
                    sent, cpu_s = sum(each.sent_bytes for each in stores), time.process_time()
                    mine, *theirs = _weights(scale, version)
                    ranks.begin(theirs)
                    manifest = await publisher.publish(
                        mine, policy_version=version, stage="rl", trains_from=0
                    )
                    times = await _from_all(said, scale)
                    blobs = manifest.deltas[-1].blobs if version else manifest.snapshot_blobs
                    figures.append(
                        {
                            **_measured(blobs, times, time.process_time() - cpu_s),
                            "copies": (sum(each.sent_bytes for each in stores) - sent)
                            / sum(b.size_bytes for b in blobs),
                        }
                    )
                await publisher.close()
        return [_beside_model(scale, loops, figures) for figures in found]


def _measured(blobs: Sequence[BlobRef], times: list[dict[str, float]], cpu_s: float) -> dict[str, float]:
    heard_s = min(one["heard_s"] for one in times)
    seconds = max(one["fetched_s"] for one in times) - heard_s
    until_done_s = max(one["done_s"] for one in times) - heard_s
    return {
        "size_bytes": sum(blob.size_bytes for blob in blobs), "parts": max(blob.parts for blob in blobs),
        "measured_s": seconds, "applied_s": until_done_s - seconds,
        "cores": (cpu_s + sum(one["cpu_s"] for one in times)) / until_done_s,
    }  # fmt: skip


def _beside_model(scale: Scale, loops: Mapping[str, Any], rounds: list[dict[str, float]]) -> dict[str, Json]:
    machine = Machine(scale.paced_bytes_per_s, **loops, ranks=scale.ranks)
    size_bytes = int(rounds[0]["size_bytes"])
    runs = [received_s(machine, scale.hosts, size_bytes, scale.part_bytes) for _ in range(MODEL_RUNS)]
    return {
        "size_bytes": size_bytes, "parts_of_a_rank": int(rounds[0]["parts"]),
        "model_s": round(mean(runs), 2), "model_deviation_s": round(stdev(runs), 2),
        "over_model": round(mean(one["measured_s"] for one in rounds) / mean(runs), 3),
        **{name: [round(one[name], 2) for one in rounds] for name in SAID},
    }  # fmt: skip


SAID = ("measured_s", "applied_s", "cores", "copies")
"""Figures of each round: seconds until all hosts have a version, and those that they take to apply it; cores
that all processes used; copies that the learner sent."""


def _weights(scale: Scale, version: int) -> list[Tensors]:
    """Return the weights of each rank, of which each version changes a tenth, so that a delta has several
    parts."""
    return [_tensors(scale.size_bytes // scale.ranks, version, rank) for rank in range(scale.ranks)]


def _tensors(size_bytes: int, version: int, rank: int) -> dict[str, HostTensor]:
    words = np.random.default_rng(rank).integers(0, 1 << 16, size_bytes // 2, dtype=np.uint16)
    changed = np.arange(version % 10, len(words), 10)
    if version:
        drawn = np.random.default_rng((rank, version))
        words[changed] = drawn.integers(0, 1 << 16, len(changed), dtype=np.uint16)
    return {f"w{rank}": HostTensor("BF16", words.shape, words)}


@asynccontextmanager
async def _other_stores(bus: Bus, scale: Scale, directory: Path) -> AsyncIterator[list[HttpBlobs]]:
    """Start the stores of the ranks beside rank 0."""
    async with AsyncExitStack() as stack:
        stores = []
        for rank in range(1, scale.ranks):
            transport = HttpTransport(bytes_per_s=scale.paced_bytes_per_s)
            stores.append(HttpBlobs(bus, directory / f"rank-{rank}", transport))
            await stores[-1].start()
            stack.push_async_callback(stores[-1].close)
        yield stores


@asynccontextmanager
async def _hosts(bus: Bus, scale: Scale) -> AsyncIterator[asyncio.Queue[dict[str, float]]]:
    """Start the hosts; yields what they say of each version."""
    said: asyncio.Queue[dict[str, float]] = asyncio.Queue()

    async def hear(message: Any) -> None:
        said.put_nowait(json.loads(message.data))

    await bus.client.subscribe(DONE, cb=hear)
    url = bus.client.connected_url
    assert url is not None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the libraries are loaded once for all hosts
    paths = os.pathsep.join([*PACKAGES, os.environ.get("PYTHONPATH", "")])  # by which it finds this module
    started = []
    try:
        with patch.dict(os.environ, PYTHONPATH=paths):
            for _ in range(scale.hosts):
                host = context.Process(target=_run_host, args=(url.geturl(), scale), daemon=True)
                await asyncio.to_thread(host.start)
                started.append(host)
        await _from_all(said, scale)  # each says that it listens
        yield said
    finally:
        for host in started:
            host.kill()


async def _from_all(said: asyncio.Queue[dict[str, float]], scale: Scale) -> list[dict[str, float]]:
    """Return what each host says next. Raises `TimeoutError`."""
    async with asyncio.timeout(scale.slower * TIMEOUT_S):
        return [await said.get() for _ in range(scale.hosts)]


def _end_with_benchmark() -> None:
    """End this process when the benchmark has: the kernel would only tell of what forks the hosts, which
    lives as long as they do."""
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None
    benchmark.join()
    os._exit(1)


def _run_host(url: str, scale: Scale) -> None:
    threading.Thread(target=_end_with_benchmark, daemon=True).start()
    with scale.applied():
        asyncio.run(_host(url, scale))


async def _host(url: str, scale: Scale) -> None:
    """Receive each version that is announced, until this process is killed."""
    paced = Downlink(scale.paced_bytes_per_s).fetch_part
    swarm.fetch_part = paced  # type: ignore[attr-defined]  # it calls the product's own
    heard: asyncio.Queue[tuple[PolicyManifest, float]] = asyncio.Queue()
    async with Bus.connect(BusConfig(url=url), RUN, name="host") as bus:
        config = PeerConfig(bytes_per_s=scale.paced_bytes_per_s)
        blobs = TimedBlobs(Blobs(bus, swarm.Swarm(bus, config, machine="another")))
        receiver = Receiver(blobs)
        await bus.listen(
            bus.subject("notice", "policy"), PolicyManifest,
            lambda manifest: heard.put_nowait((manifest, time.monotonic())),
        )  # fmt: skip
        await bus.client.publish(DONE, b"{}")
        while True:
            manifest, heard_s = await heard.get()
            cpu_s = time.process_time()
            await receiver.advance(manifest)
            cpu_s, done_s = time.process_time() - cpu_s, time.monotonic()
            done = {"heard_s": heard_s, "fetched_s": blobs.fetched_s, "done_s": done_s, "cpu_s": cpu_s}
            await bus.client.publish(DONE, json.dumps(done).encode())
