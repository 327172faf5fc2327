"""Tells how long many hosts take from the announcement of a version until they have it, beside what the cost
model says: the real publisher, swarm and receivers, in processes whose links are paced."""

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any
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
from storage.settings.weights_transport import PeerConfig
from storage.weights import blob_http, blob_parts, blob_sources, swarm
from storage.weights.blob_parts import part_range
from storage.weights.blob_sources import Blobs
from storage.weights.tensors import HostTensor

DONE = "bench.done"
"""Subject on which hosts say what they have."""
QUESTION_S = 0.0005
"""Time of the learner's loop for a question where parts are."""
LOOP_S = {"sending_s": 0.5e-9, "receiving_s": 0.9e-9}
"""Time of an event loop for a byte over HTTP."""
DIGEST_BYTES_PER_S = 1.26e9
MODELS = {"8B": 16.4e9, "32B": 65.5e9, "235B": 470e9}
"""Bytes of weights in bfloat16."""
MODEL_RUNS = 5
"""Runs of the model, which draws the order of parts as the tracker does."""
LINKS = {"100 Gb/s": 12.5e9, "400 Gb/s": 50e9}


@dataclass(frozen=True)
class Scale:
    """A simulated cluster: sizes and bandwidths are scaled down, the number of parts is not."""

    hosts: int
    size_bytes: int
    part_bytes: int
    link_bytes_per_s: int

    def scale_parts(self) -> None:
        """Have this process use parts of this size."""
        blob_parts.BLOCK_BYTES = blob_sources.SMALL_BYTES = self.part_bytes
        blob_http.BOUNDED_BYTES = max(1, self.part_bytes // 8)  # readers of a server share its link


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


def predictions(hosts: int) -> dict[str, Json]:
    """Return what the model says of real sizes and links, in seconds."""
    found: dict[str, Json] = {}
    for link, bytes_per_s in LINKS.items():
        machine = Machine(bytes_per_s, question_s=QUESTION_S, digest_bytes_per_s=DIGEST_BYTES_PER_S, **LOOP_S)
        for model, size_bytes in MODELS.items():
            stages = version_s(machine, Work(), hosts, int(size_bytes))
            found[f"{model}, {link}"] = {name: round(seconds, 2) for name, seconds in stages.items()}
    return found


async def bench_scale(scale: Scale, *, versions: int) -> list[dict[str, float]]:
    """Return what the first version and later ones took to all hosts, measured and by the model."""
    scale.scale_parts()
    found: list[dict[str, float]] = []
    async with serving(bytes_per_s=scale.link_bytes_per_s) as (bus, store), _hosts(bus, scale) as said:
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as made:
            (Path(made) / "config.json").write_text("{}")
            publisher = WeightPublisher(bus, store, PublicationConfig(snapshot_every=1000), incarnation="one")
            await publisher.start(Path(made))
            for version in range(versions + 1):
                sent = store.sent_bytes
                tensors = _weights(scale.size_bytes, version)
                manifest = await publisher.publish(tensors, policy_version=version, stage="rl", trains_from=0)
                times = await _from_all(said, scale)
                blob = manifest.deltas[-1].blob if version else manifest.snapshot
                copies = round((store.sent_bytes - sent) / blob.size_bytes, 2)
                found.append({**_compared(scale, blob, times), "copies": copies})
            await publisher.close()
    return found


def _compared(scale: Scale, blob: BlobRef, times: list[dict[str, float]]) -> dict[str, float]:
    measured_s = max(one["done_s"] for one in times) - min(one["heard_s"] for one in times)
    machine = Machine(scale.link_bytes_per_s, question_s=QUESTION_S)
    model_s = mean(received_s(machine, scale.hosts, blob.size_bytes, blob.parts) for _ in range(MODEL_RUNS))
    return {
        "size_bytes": blob.size_bytes, "parts": blob.parts, "measured_s": round(measured_s, 3),
        "model_s": round(model_s, 3), "cpu_s": round(sum(one["cpu_s"] for one in times), 2),
    }  # fmt: skip


def _weights(size_bytes: int, version: int) -> dict[str, HostTensor]:
    """Return weights of which each version changes a tenth, so that a delta has several parts."""
    words = np.random.default_rng(0).integers(0, 1 << 16, size_bytes // 2, dtype=np.uint16)
    changed = np.arange(version % 10, len(words), 10)
    if version:
        words[changed] = np.random.default_rng(version).integers(0, 1 << 16, len(changed), dtype=np.uint16)
    return {"w": HostTensor("BF16", words.shape, words)}


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
    async with asyncio.timeout(TIMEOUT_S):
        return [await said.get() for _ in range(scale.hosts)]


def _run_host(url: str, scale: Scale) -> None:
    asyncio.run(_host(url, scale))


async def _host(url: str, scale: Scale) -> None:
    """Receive each version that is announced, until this process is killed."""
    scale.scale_parts()
    paced = Downlink(scale.link_bytes_per_s).fetch_part
    swarm.fetch_part = paced  # type: ignore[attr-defined]  # it calls the product's own
    heard: asyncio.Queue[tuple[PolicyManifest, float]] = asyncio.Queue()
    async with Bus.connect(BusConfig(url=url), RUN, name="host") as bus:
        receiver = Receiver(
            Blobs(bus, swarm.Swarm(bus, PeerConfig(bytes_per_s=scale.link_bytes_per_s), machine="another"))
        )
        await bus.listen(
            bus.subject("notice", "policy"), PolicyManifest,
            lambda manifest: heard.put_nowait((manifest, time.monotonic())),
        )  # fmt: skip
        await bus.client.publish(DONE, b"{}")
        while True:
            manifest, heard_s = await heard.get()
            cpu_s = time.process_time()
            await receiver.advance(manifest)
            done = {"heard_s": heard_s, "done_s": time.monotonic(), "cpu_s": time.process_time() - cpu_s}
            await bus.client.publish(DONE, json.dumps(done).encode())
