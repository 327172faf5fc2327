"""How fast is replay, as ratios against the plainest thing that does the same on this machine in this run.

`python -m storage.bench [--full]` prints them as JSON. The two sides of a ratio take turns; each is the
median of its rounds. Wall-clock times, except `ingest_cost_1e6_over_1e3`, which is CPU time of this process.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop
from numpy.typing import NDArray

from bus.codec import Json, encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.messages import Trajectory, TrajectoryBatch, group_name
from bus.publish import Publisher
from bus.server import NatsServer
from bus.topology import ensure
from storage.files import fsync_path
from storage.replay import INDEX_FILE, ReplayStore
from storage.segments import TOKEN_ARRAYS, write_segment
from storage.shard import Shard

GROUP = 8
SWITCH_INTERVAL_S = 0.0005
"""As the storage process has it."""
READ = 512
"""Trajectories of one random read."""
TOKENS = 1900
"""Median length; lengths are log-normal, as those of rollouts are."""
SHORT = 16
"""Tokens of a trajectory where the count matters and not the bytes: any fixed cost shows most."""
LIMITS: dict[str, Json] = {
    "write_over_memmap": 0.8,
    "read_over_memmap": 0.9,
    "ingest_cost_1e6_over_1e3": 1.2,  # at most; all others at least
    "stored_over_pull_ack": 0.5,
}
LIMITED_BY: dict[str, Json] = {
    "write_over_memmap": "disk: each side waits once a segment for fsync of all its files and directories",
    "read_over_memmap": "memory bandwidth and page faults: the files are in the page cache on both sides",
    "ingest_cost_1e6_over_1e3": "CPU: packing records and writing files, the index is a few percent",
    "stored_over_pull_ack": "CPU, one after the other: pull, decode with its checks, write and fsync",
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    written: int
    """Trajectories a segment of the write comparison."""
    stored: int
    """Trajectories in the store of the read comparison."""
    many: int
    """Trajectories in the large store."""
    messages: int
    """Groups sent through the shard."""


QUICK = Size(rounds=7, written=512, stored=8192, many=1_000_000, messages=300)
FULL = Size(rounds=15, written=2048, stored=65536, many=1_000_000, messages=1000)


class Material:
    """Token arrays of many trajectories, back to back, as a memory map holds them."""

    def __init__(self, count: int, tokens: int) -> None:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(tokens), 0.35, count), 2, 8 * tokens).astype(np.int64)
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        total = int(self.ends[-1])
        self.arrays: dict[str, NDArray[np.generic]] = {
            "token_ids": rng.integers(0, 150_000, total, dtype=np.int32),
            "policy_versions": np.ones(total, np.int32),
            "behaviour_logprobs": -rng.random(total, dtype=np.float32),
            "loss_mask": np.ones(total, np.bool_),
        }
        self.size_bytes = sum(array.nbytes for array in self.arrays.values())

    def __len__(self) -> int:
        return len(self.ends)

    def trajectory(self, row: int, number: int) -> Trajectory:
        """The tokens of `row` as the run's `number`-th trajectory."""
        lease_id, sample = divmod(number, GROUP)
        part = slice(int(self.begins[row]), int(self.ends[row]))
        return Trajectory(
            trajectory_id=f"{group_name(lease_id)}.{sample}",
            group_id=group_name(lease_id),
            lease_id=lease_id,
            sample=sample,
            group_size=GROUP,
            reward=1.0,
            actor="bench",
            metadata={"turns": 1},
            **{name: self.arrays[name][part] for name in TOKEN_ARRAYS},  # type: ignore[arg-type]
        )

    def trajectories(self, begin: int, count: int) -> list[Trajectory]:
        """From the `begin`-th of the run on; tokens come round again."""
        return [self.trajectory(n % len(self), n) for n in range(begin, begin + count)]


def bench_replay(*, full: bool = False, directory: Path | None = None) -> dict[str, Json]:
    """All ratios with their limits, and the absolute figures behind them. Works below `directory`."""
    size = FULL if full else QUICK
    ratios: dict[str, Json] = {}
    absolute: dict[str, Json] = {"cores": os.cpu_count(), "full": full}
    with tempfile.TemporaryDirectory(dir=directory, prefix="sluice-bench-") as made:
        for part in (_bench_write, _bench_read, _bench_many, _bench_shard):
            gc.collect()
            (Path(made) / part.__name__).mkdir()
            found, figures = part(Path(made) / part.__name__, size)
            ratios |= found
            absolute |= figures
    return {"ratios": ratios, "limits": LIMITS, "limited_by": LIMITED_BY, "absolute": absolute}


Figures = dict[str, Json]


def _taking_turns(rounds: int, *sides: Callable[[int], None], clock: Callable[[], float]) -> list[float]:
    """Median seconds of each side; a first round, not counted, warms up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for n in range(rounds + 1):
        for side, times in zip(sides, seconds, strict=True):
            began = clock()
            side(n)
            times.append(clock() - began)
    return [statistics.median(times[1:]) for times in seconds]


def _save_memmaps(directory: Path, material: Material) -> None:
    """np.memmap bulk write and flush, durable like a segment."""
    directory.mkdir()
    for name, array in material.arrays.items():
        mapped = np.memmap(directory / name, dtype=array.dtype, mode="w+", shape=array.shape)
        mapped[:] = array
        mapped.flush()
        fsync_path(directory / name)
    fsync_path(directory)
    fsync_path(directory.parent)


def _bench_write(directory: Path, size: Size) -> tuple[Figures, Figures]:
    material = Material(size.written, TOKENS)
    trajectories = material.trajectories(0, size.written)
    segment, memmap = _taking_turns(
        size.rounds,
        lambda n: void(write_segment(directory / f"segment_{n:08d}", trajectories)),
        lambda n: _save_memmaps(directory / f"memmap_{n}", material),
        clock=time.perf_counter,
    )
    megabytes = material.size_bytes / 1e6
    return {"write_over_memmap": memmap / segment}, {
        "segment_MB": megabytes,
        "segment_write_MB_s": megabytes / segment,
        "memmap_write_MB_s": megabytes / memmap,
    }


def void(_: object) -> None:
    """For a call whose result nobody needs."""


def _bench_read(directory: Path, size: Size) -> tuple[Figures, Figures]:
    material = Material(size.stored, TOKENS)
    _save_memmaps(directory / "memmap", material)
    with closing(ReplayStore.open(directory / "store")) as store:
        for begin in range(0, size.stored, READ):
            store.append(material.trajectories(begin, READ))
        while store.compact():
            pass
        maps = [
            np.memmap(directory / "memmap" / name, dtype=array.dtype, mode="r")
            for name, array in material.arrays.items()
        ]
        choices = np.random.default_rng(1).integers(0, size.stored // GROUP, (2, 64, READ // GROUP))

        def from_store(n: int) -> None:
            store.read(choices[0, n].tolist())

        def from_memmap(n: int) -> None:
            rows = [lease * GROUP + sample for lease in choices[1, n].tolist() for sample in range(GROUP)]
            for row in rows:
                begin, end = int(material.begins[row]), int(material.ends[row])
                for mapped in maps:
                    np.array(mapped[begin:end])

        stored, memmap = _taking_turns(4 * size.rounds, from_store, from_memmap, clock=time.perf_counter)
        segments = len(store.pieces)
    megabytes = READ * material.size_bytes / size.stored / 1e6
    return {"read_over_memmap": memmap / stored}, {
        "read_store_MB": material.size_bytes / 1e6,
        "read_segments": segments,
        "read_512_ms": 1e3 * stored,
        "read_MB_s": megabytes / stored,
        "memmap_read_MB_s": megabytes / memmap,
    }


def _bench_many(directory: Path, size: Size) -> tuple[Figures, Figures]:
    material = Material(4096, SHORT)
    few = ReplayStore.open(directory / "few")
    few.append(material.trajectories(0, 1000))
    many = ReplayStore.open(directory / "many")
    began = time.process_time()
    for begin in range(0, size.many, 8000):
        many.append(material.trajectories(begin, min(8000, size.many - begin)))
    fill = time.process_time() - began
    batches = [[material.trajectories(n + 512 * r, 512) for r in range(15)] for n in (1000, size.many)]
    gc.collect()
    cost_few, cost_many = _taking_turns(
        14,
        lambda n: void(few.append(batches[0][n])),
        lambda n: void(many.append(batches[1][n])),
        clock=time.process_time,
    )
    few.close()
    began = time.process_time()
    while many.compact():
        pass
    compacting = time.process_time() - began
    rows = many.trajectories
    many.close()
    gc.collect()
    return {"ingest_cost_1e6_over_1e3": cost_many / cost_few}, {
        "trajectories": rows,
        "ingest_us_1e3": 1e6 * cost_few / 512,
        "ingest_us_1e6": 1e6 * cost_many / 512,
        "fill_us": 1e6 * fill / size.many,
        "compaction_us": 1e6 * compacting / rows,
        **_opened(directory / "many"),
    }


def _opened(directory: Path) -> Figures:
    """Opening a store, by its index file and without it, and finding a random group in it."""
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    store = ReplayStore.open(directory, writable=False)
    seconds = time.perf_counter() - began
    memory = psutil.Process().memory_info().rss - before
    rng = np.random.default_rng(2)
    began = time.perf_counter()
    for _ in range(10_000):
        store.rows_of(store.completed[rng.integers(len(store.completed))])
    choosing = (time.perf_counter() - began) / 10_000
    store.close()
    (directory / INDEX_FILE).unlink()
    began = time.perf_counter()
    ReplayStore.open(directory, writable=False).close()
    return {
        "open_s": seconds,
        "open_without_index_s": time.perf_counter() - began,
        "open_segments": len(store.pieces),
        "open_rss_MB": memory / 1e6,
        "choose_group_us": 1e6 * choosing,
    }


def _bench_shard(directory: Path, size: Size) -> tuple[Figures, Figures]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return uvloop.run(_through_shard(directory, size))
    finally:
        sys.setswitchinterval(before)


async def _through_shard(directory: Path, size: Size) -> tuple[Figures, Figures]:
    material = Material(GROUP * 64, TOKENS)
    groups = [material.trajectories(GROUP * n, GROUP) for n in range(size.messages)]
    messages = [encode(TrajectoryBatch(trajectories=tuple(group))) for group in groups]
    megabytes = sum(map(len, messages)) / 1e6
    stored: list[float] = []
    waiting: list[float] = []
    pulled: list[float] = []
    async with NatsServer(directory / "bus") as server:
        for n in range(3):
            async with Bus.connect(BusConfig(url=server.url), f"bench{n}", name="bench") as bus:
                await ensure(bus.js, bus.topology, shards=1)
                pulled.append(await _pull_and_ack(bus, messages))
                with closing(ReplayStore.open(directory / f"stored_{n}")) as store:
                    stored.append(await _store(bus, store, messages, beforehand=False))
                with closing(ReplayStore.open(directory / f"waiting_{n}")) as store:
                    waiting.append(await _store(bus, store, messages, beforehand=True))
                await bus.js.delete_stream(bus.topology.stream("TRAJECTORIES"))
    alone, whole, from_stream = (statistics.median(times) for times in (pulled, stored, waiting))
    return {"stored_over_pull_ack": alone / whole}, {
        "message_KB": 1e3 * megabytes / len(messages),
        "pull_ack_MB_s": megabytes / alone,
        "publish_stored_acked_MB_s": megabytes / whole,
        "pull_stored_acked_MB_s": megabytes / from_stream,
        "pull_stored_acked_over_pull_ack": alone / from_stream,
    }


async def _publish(bus: Bus, messages: list[bytes], attempt: str) -> None:
    publisher = Publisher(bus)
    async with asyncio.TaskGroup() as tasks:
        for n, message in enumerate(messages):
            subject = bus.subject("trajectories", 0)
            tasks.create_task(publisher.publish(subject, message, message_id=f"{attempt}-{n}"))


async def _pull_and_ack(bus: Bus, messages: list[bytes]) -> float:
    """Seconds for pulling messages that wait on the stream, and nothing but acking them."""
    await _publish(bus, messages, "pulled")
    stream = bus.topology.stream("TRAJECTORIES")
    inbox = await bus.js.pull_subscribe_bind("shard-0", stream)
    began = time.perf_counter()
    left = len(messages)
    while left:
        for raw in await inbox.fetch(min(64, left), timeout=5):
            await raw.ack()
            left -= 1
    await _empty(bus)
    seconds = time.perf_counter() - began
    await inbox.unsubscribe()
    return seconds


async def _store(bus: Bus, store: ReplayStore, messages: list[bytes], *, beforehand: bool) -> float:
    """Seconds until all are stored and acked, of publishing too unless that was done `beforehand`."""
    stop = asyncio.Event()
    shard = Shard(bus, store, 0, shards=1, was_issued=lambda lease_id: True, linger_s=0.02)
    if beforehand:
        await _publish(bus, messages, str(store.directory))
    began = time.perf_counter()
    task = asyncio.create_task(shard.run(stop))
    if not beforehand:
        await _publish(bus, messages, str(store.directory))
    await _empty(bus)
    seconds = time.perf_counter() - began
    stop.set()
    await task
    if store.trajectories != GROUP * len(messages):
        raise RuntimeError(f"{store.trajectories} trajectories stored of {GROUP * len(messages)}")
    return seconds


async def _empty(bus: Bus) -> None:
    while (await bus.js.stream_info(bus.topology.stream("TRAJECTORIES"))).state.messages:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="more rounds and more data: some minutes")
    parser.add_argument("--directory", type=Path, help="where to write; the disk that is measured")
    options = parser.parse_args()
    figures = bench_replay(full=options.full, directory=options.directory)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
