"""Leases from their issue to the commit of their step, with a thousand actors and eight shards.

`python -m benchmarks.replay_leases dispatcher|shards|actors URL DIRECTORY` is one of the processes
measured: the real dispatcher on a real ledger; real shards;
actors that take a lease, make its group up and publish it,
each over a connection of its own. The learner is made up here: it asks, commits and publishes at once.
"""

import asyncio
import gc
import os
import sqlite3
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path

import psutil
import structlog
import uvloop

from benchmarks.replay_workload import SHORT, Figures, Material, Size
from benchmarks.run_bus import make_run
from bus.codec import encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import BlobRef, Lease, PolicyManifest, Prompt
from bus.process.child_process import module_command
from bus.process.process_tuning import paced
from bus.requests import BatchLease, BatchRequest, Done, StepCommitted, Waiting
from bus.server.nats_server import NatsServer
from bus.streams.consume import Inbox, consume
from bus.streams.publish import Publisher
from bus.topology import shard_of
from bus.trajectory import TrajectoryBatch
from storage.dispatch.dispatcher import Dispatcher
from storage.ledger.ledger import Ledger
from storage.prompts.data_sets import DataSets
from storage.settings.admission import AdmissionConfig
from storage.shard.server import Shard
from storage.store.replay import ReplayStore

RUN = "bench"
ACTORS = 1000
SHARDS = 8
SAMPLES = 2
ADMISSION = AdmissionConfig(groups_per_step=500, samples_per_prompt=SAMPLES, max_staleness=3)
LEARNER = "bench"
TIMEOUT_S = 300.0


def bench_leases(directory: Path, size: Size) -> tuple[Figures, Figures]:
    """`leases_per_s`: leases for each second of the dispatcher's CPU time, all its work for them included.

    So many it serves on a core of its own; here it shares the cores with a thousand actors."""
    return uvloop.run(_measure(directory, size.leases // ADMISSION.groups_per_step))


async def _measure(directory: Path, steps: int) -> tuple[Figures, Figures]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(directory / "bus"))
        bus = await stack.enter_async_context(Bus.connect(BusConfig(url=server.url), RUN, name="learner"))
        await make_run(bus, shards=SHARDS)
        server_before = _rss(server.pid)
        parts = {}
        for part in ("shards", "dispatcher", "actors"):
            parts[part] = await stack.enter_async_context(_part(part, server.url, directory))
        server_bytes = (_rss(server.pid) - server_before) // ACTORS
        busy = {part: psutil.Process(pid) for part, (pid, _) in parts.items()}
        busy["nats_server"] = psutil.Process(server.pid)
        before = {part: _cpu_s(process) for part, process in busy.items()}
        began = time.perf_counter()
        await _learn(bus, steps)
        await _all_stored(directory)
        seconds = time.perf_counter() - began
        cpu_s = {part: _cpu_s(process) - before[part] for part, process in busy.items()}
        actors_pid, before_connecting = parts["actors"]
        connection_bytes = (_rss(actors_pid) - before_connecting) // ACTORS
    issued, lost = _count(directory)
    return {"leases_per_s": issued / cpu_s["dispatcher"]}, {
        "leases": issued,
        "lost": lost,
        "actors": ACTORS,
        "shards": SHARDS,
        "leases_per_s_together": issued / seconds,
        **{f"{part}_us_a_lease": 1e6 * spent / issued for part, spent in cpu_s.items()},
        "actor_connection_rss_bytes": connection_bytes,
        "server_connection_rss_bytes": server_bytes,
    }


def _rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _learn(bus: Bus, steps: int) -> None:
    """Train at the speed of thought."""
    await _publish_policy(bus, 0, "rl")
    for step in range(1, steps + 1):
        request = BatchRequest(step=step, policy_version=step - 1, incarnation=LEARNER)
        async with asyncio.timeout(TIMEOUT_S):
            subject = bus.subject("rpc", "batch")
            while isinstance(
                await bus.request(subject, request, BatchLease, Waiting, timeout_s=TIMEOUT_S), Waiting
            ):
                continue
        await _publish_policy(bus, step, "done" if step == steps else "rl")
        committed = StepCommitted(step=step, incarnation=LEARNER)
        await bus.request(bus.subject("rpc", "committed"), committed, Done, timeout_s=TIMEOUT_S)


async def _publish_policy(bus: Bus, version: int, stage: str) -> None:
    blob = BlobRef(subject="nowhere", chunks=1, size_bytes=1, digest="0")
    policy = PolicyManifest(
        policy_version=version, incarnation=LEARNER, snapshot=blob, model=blob, stage=stage
    )
    await bus.put("policy", policy)
    await bus.notify(bus.subject("notice", "policy"), policy)


async def _all_stored(directory: Path) -> None:
    """Return once no lease rolls out any more, by the ledger on the disk."""
    ledger = sqlite3.connect(f"file:{directory}/ledger.sqlite?mode=ro", uri=True)
    with closing(ledger):
        async with asyncio.timeout(TIMEOUT_S):
            while ledger.execute("SELECT 1 FROM leases WHERE state = 'issued' LIMIT 1").fetchone():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def _count(directory: Path) -> tuple[int, int]:
    """Return the leases issued, and those whose group is not complete in the shard where it belongs."""
    with closing(Ledger.open(directory / "ledger.sqlite")) as ledger:
        issued = ledger.next_id
    complete: set[int] = set()
    for n in range(SHARDS):
        with closing(ReplayStore.open(directory / f"shard-{n}", writable=False)) as store:
            complete |= set(store.completed)
    return issued, len(set(range(issued)) - complete)


# --- the processes that are measured ---


@asynccontextmanager
async def _part(name: str, url: str, directory: Path) -> AsyncIterator[tuple[int, int]]:
    """Yield one of them at work, until the end: its process id, and its memory before it connected."""
    process = await asyncio.create_subprocess_exec(
        *module_command(__name__, name, url, str(directory)), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            said = await process.stdout.readline()
        if not said:
            raise BusError(f"the {name} of the bench ended: see above")
        yield process.pid, int(said)
    finally:
        process.stdin.close()
        async with asyncio.timeout(60):
            await process.wait()


def _ready_until_input_ends(rss_bytes: int = 0) -> asyncio.Event:
    """Say that all is ready; the event is set when the bench closes our input."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    sys.stdout.write(f"{rss_bytes}\n")
    sys.stdout.flush()
    return stop


async def _dispatch(url: str, directory: Path) -> None:
    prompts = [Prompt(content=f"prompt {n}") for n in range(1000)]
    async with Bus.connect(BusConfig(url=url), RUN, name="dispatcher") as bus:
        with closing(Ledger.open(directory / "ledger.sqlite")) as ledger:
            data = DataSets(ledger, directory)
            data.configure(prompts, seed=0, shuffle=True, source="the bench")
            dispatcher = Dispatcher(bus, ledger, data, ADMISSION, shards=SHARDS, seed=0)
            dispatcher.admit()
            await dispatcher.run(_ready_until_input_ends(), reissue=False)


async def _shards(url: str, directory: Path) -> None:
    async with Bus.connect(BusConfig(url=url), RUN, name="shards") as bus:
        with ExitStack() as stack:
            stores = [
                stack.enter_context(closing(ReplayStore.open(directory / f"shard-{n}")))
                for n in range(SHARDS)
            ]
            stop = _ready_until_input_ends()
            async with asyncio.TaskGroup() as tasks:
                for n, store in enumerate(stores):
                    shard = Shard(bus, store, n, shards=SHARDS, was_issued=lambda _: True, linger_s=0.02)
                    tasks.create_task(shard.run(stop))


async def _actors(url: str, _: Path) -> None:
    material = Material(SAMPLES * 64, SHORT)
    async with AsyncExitStack() as stack:
        gc.collect()
        before = _rss(os.getpid())
        connected = [
            await stack.enter_async_context(Bus.connect(BusConfig(url=url), RUN, name=f"actor-{n}"))
            for n in range(ACTORS)
        ]
        stop = _ready_until_input_ends(before)
        async with asyncio.TaskGroup() as tasks:
            for bus in connected:
                tasks.create_task(_act(bus, material, stop))


async def _act(bus: Bus, material: Material, stop: asyncio.Event) -> None:
    publisher = Publisher(bus)

    async def roll_out(lease: Lease) -> None:
        first = SAMPLES * lease.lease_id
        numbers = range(first, first + lease.samples)
        group = tuple(material.trajectory(n % len(material), n, lease.samples) for n in numbers)
        subject = bus.subject("trajectories", shard_of(lease.lease_id, SHARDS))
        data = encode(TrajectoryBatch(trajectories=group))
        await publisher.publish(subject, data, message_id=lease.group_id)

    inbox = Inbox(bus, "TASKS", "rollout")
    await consume(inbox, bus, Lease, roll_out, stop=stop, concurrency=1)


_PARTS: dict[str, Callable[[str, Path], object]] = {
    "dispatcher": _dispatch, "shards": _shards, "actors": _actors
}  # fmt: skip

if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is a pipe
    part, url, directory = sys.argv[1:]
    with paced():
        uvloop.run(_PARTS[part](url, Path(directory)))  # type: ignore[arg-type]
