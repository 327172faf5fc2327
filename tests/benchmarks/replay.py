"""Tells how fast replay is, as ratios against the plainest thing that does the same on this machine in this
run.

`python -m benchmarks.replay [--full]` prints them as JSON. The two sides of a ratio take turns; each
is the median of its rounds. Wall-clock times, except `ingest_cost_1e6_over_1e3` and `leases_per_s`: CPU time
of the process that is measured, so that what else this machine does counts less.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import structlog

from benchmarks.replay_ingest import bench_ingest
from benchmarks.replay_leases import bench_leases
from benchmarks.replay_reads import bench_fetch
from benchmarks.replay_workload import GROUP, SHORT, TOKENS, Figures, Material, Size
from bus.codec import Json
from storage.disk.atomic_files import fsync_path
from storage.store.loading import INDEX_FILE
from storage.store.replay import ReplayStore
from storage.store.segments import write_segment

READ = 512
"""Trajectories of one random read."""
LIMITS: dict[str, Json] = {
    "write_over_memmap": 0.8,
    "read_over_memmap": 0.9,
    "ingest_cost_1e6_over_1e3": 1.2,  # at most; all others at least
    "stored_over_pull_ack": 0.5,
    "leases_per_s": 2000,
}
LIMITED_BY: dict[str, Json] = {
    "write_over_memmap": "disk: each side waits once a segment for fsync of all its files and directories",
    "read_over_memmap": "memory bandwidth and page faults: the files are in the page cache on both sides",
    "ingest_cost_1e6_over_1e3": "CPU: packing records and writing files, the index is a few percent",
    "stored_over_pull_ack": "CPU: nats-server, and decoding and the copy to the page cache beside each other",
    "leases_per_s": "CPU of the dispatcher, mostly the client library; of all parts together the actors'",
}

QUICK = Size(rounds=7, written=512, stored=8192, many=1_000_000, messages=300, leases=2000)
FULL = Size(rounds=15, written=2048, stored=65536, many=1_000_000, messages=1000, leases=20_000)


def bench_replay(*, full: bool = False, directory: Path | None = None) -> dict[str, Json]:
    """Return all ratios with their limits, and the absolute figures behind them. Works below `directory`."""
    size = FULL if full else QUICK
    ratios: dict[str, Json] = {}
    absolute: dict[str, Json] = {"cores": os.cpu_count(), "full": full}
    with tempfile.TemporaryDirectory(dir=directory, prefix="sluice-bench-") as made:
        for part in (_bench_write, _bench_read, _bench_many, bench_ingest, bench_leases):
            gc.collect()
            (Path(made) / part.__name__).mkdir()
            found, figures = part(Path(made) / part.__name__, size)
            ratios |= found
            absolute |= figures
        absolute |= bench_fetch(Path(made) / "fetch")
    return {"ratios": ratios, "limits": LIMITS, "limited_by": LIMITED_BY, "absolute": absolute}


def _taking_turns(
    rounds: int,
    *sides: Callable[[int], None],
    clock: Callable[[], float],
    between: Callable[[], None] = lambda: None,
) -> list[float]:
    """Median seconds of each side; a first round, not counted, warms up."""
    seconds: list[list[float]] = [[] for _ in sides]
    for n in range(rounds + 1):
        for side, times in zip(sides, seconds, strict=True):
            began = clock()
            side(n)
            times.append(clock() - began)
            between()
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
        between=lambda: _clear(directory),
    )
    megabytes = material.size_bytes / 1e6
    return {"write_over_memmap": memmap / segment}, {
        "segment_MB": megabytes,
        "segment_write_MB_s": megabytes / segment,
        "memmap_write_MB_s": megabytes / memmap,
    }


def _clear(directory: Path) -> None:
    """Remove what a turn wrote, so that the next gets its memory: a page that a virtual machine has not used
    yet, or has given back, costs several times what writing to it does."""
    for written in directory.iterdir():
        shutil.rmtree(written)


def void(_: object) -> None:
    """Take the result of a call that nobody needs."""


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
        segments = len(store.entries)
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
        store.locate([store.completed[rng.integers(len(store.completed))]])
    choosing = (time.perf_counter() - began) / 10_000
    store.close()
    (directory / INDEX_FILE).unlink()
    began = time.perf_counter()
    ReplayStore.open(directory, writable=False).close()
    return {
        "open_s": seconds,
        "open_without_index_s": time.perf_counter() - began,
        "open_segments": len(store.entries),
        "open_rss_MB": memory / 1e6,
        "choose_group_us": 1e6 * choosing,
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="more rounds and more data: some minutes")
    parser.add_argument("--directory", type=Path, help="where to write; the disk that is measured")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    figures = bench_replay(full=options.full, directory=options.directory)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
