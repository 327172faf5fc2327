"""`launch bench actors-scale`: what thousands of actors cost the bus, storage and a screen.

A real nats-server, a real `launch storage`, its shards in another process, and a real screen, with simulated
actors in a few processes (`benchmarks.simulated_actors`), each actor over a connection of its own. The
learner is made up here.
"""

import asyncio
import json
import shutil
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import uvloop
from nats.aio.msg import Msg

from benchmarks.simulated_actors import RUN, SAMPLES, SHARDS
from bus.codec import Json, encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusAwayError, BusError
from bus.messages import BlobRef, ModelFiles, PolicyManifest, RunRecord
from bus.process.child_process import die_with_parent, module_command
from bus.requests import BatchLease, BatchRequest, Done, LearnerResumed, StepCommitted, StoredGroups, Waiting
from bus.server.nats_server import NatsServer, free_port
from bus.streams.blob_store import put_only_blob
from bus.streams.publish import Publisher
from bus.waiting import cancelled
from launch.settings.environment_variables import without_setting_variables
from learner.initial.scratch_model import character_tokenizer
from storage.model_files.packed_files import bundle

LEARNER = "bench"
STALENESS = 8
MOST_IN_A_PROCESS = 2500
READY_S = 300.0
SUBJECTS_S = 5.0
"""Seconds in which messages are counted by kind, after those that are measured."""
ACTOR_STATUS = "status.actor"
"""Kind of the messages by which actors are heard."""
Figures = dict[str, Json]
GOALS = {"idle_messages_per_s": 5000, "dispatcher_cores": 0.5, "screen_cores": 0.5}


@dataclass(frozen=True)
class Load:
    """Says how much is measured."""

    actors: int
    window_s: float
    settle_s: float
    """Seconds before each window in which the actors find their pace."""
    rollout_s: float
    """Mean duration of a rollout."""


class Server(NatsServer):
    """A nats-server that tells how many messages passed it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._statistics = free_port(self.host)

    def _config(self) -> str:
        return f'{super()._config()}http: "{self.host}:{self._statistics}"\n'

    async def messages(self) -> tuple[int, int]:
        """Return the messages that came in and went out so far."""
        found = await self._varz()
        return int(found["in_msgs"]), int(found["out_msgs"])

    async def bytes(self) -> int:
        """Return how many bytes came in and went out so far."""
        found = await self._varz()
        return int(found["in_bytes"]) + int(found["out_bytes"])

    async def _varz(self) -> dict[str, int]:
        url = f"http://{self.host}:{self._statistics}/varz"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            found: dict[str, int] = await answer.json()
        return found


def bench_many_actors(load: Load) -> Figures:
    """Measure idle actors, then working ones."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
    try:
        return uvloop.run(_measure(directory, load))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _measure(directory: Path, load: Load) -> Figures:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(directory / "bus"))
        bus = await stack.enter_async_context(Bus.connect(BusConfig(url=server.url), RUN, name="learner"))
        pids = {"nats_server": server.pid}
        dispatcher = _launched("storage", *_storage_flags(server.url, directory, load.actors))
        pids["dispatcher"] = await stack.enter_async_context(dispatcher)
        shards = _launched("shards", "--shards", f"0-{SHARDS - 1}", *_run_flags(server.url, directory))
        pids["shards"] = await stack.enter_async_context(shards)
        await bus.wait_for("run", RunRecord, timeout_s=READY_S, hint="did `launch storage` start?")
        learner = Learner(bus, groups=max(1, load.actors // STALENESS))
        await learner.begin(await asyncio.to_thread(_model_files, directory / "model"))
        screen = _part("screen", server.url, str(directory))
        pids["screen"] = await stack.enter_async_context(screen)
        parts = [
            _part("actors", server.url, str(directory), str(first), str(count), str(load.rollout_s))
            for first, count in _shares(load.actors)
        ]
        opened = await asyncio.gather(*map(stack.enter_async_context, parts))
        pids |= {f"actors_{n}": pid for n, pid in enumerate(opened)}
        idle = await _window(server, bus, pids, load)
        _refuse_mute(idle["kinds_per_s"])
        async with learner.learning():
            busy = await _window(server, bus, pids, load)
            stored_s = dict(learner.stored_s)
    seen = int((directory / "actors-seen").read_text())
    return {
        "actors": load.actors,
        "actors_on_the_screen": seen,
        "idle": idle,
        "busy": busy | {"steps": learner.step} | _round_trip(directory, stored_s, load),
        "goals": dict(GOALS),
    }


def _refuse_mute(kinds_per_s: Json) -> None:
    """Raise `BusError` where no actor sends a status: a bus that carries nothing would be measured."""
    if not (isinstance(kinds_per_s, dict) and kinds_per_s.get(ACTOR_STATUS)):
        raise BusError(
            f"no actor sent a status within {SUBJECTS_S:g} s, so that nothing was measured: look at what the "
            "actors of the bench wrote above, and give more seconds with --settle-s or fewer actors"
        )


def _shares(actors: int) -> Iterator[tuple[int, int]]:
    for first in range(0, actors, MOST_IN_A_PROCESS):
        yield first, min(MOST_IN_A_PROCESS, actors - first)


async def _window(server: Server, bus: Bus, pids: dict[str, int], load: Load) -> Figures:
    """Measure for a while after the actors have found their pace."""
    await asyncio.sleep(load.settle_s)
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    cpu_s, began = {name: _cpu_s(one) for name, one in processes.items()}, time.perf_counter()
    came, went = await server.messages()
    await asyncio.sleep(load.window_s)
    seconds = time.perf_counter() - began
    came_now, went_now = await server.messages()
    return {
        "in_per_s": round((came_now - came) / seconds, 1),
        "out_per_s": round((went_now - went) / seconds, 1),
        "messages_per_s": round((came_now - came + went_now - went) / seconds, 1),
        "cores": {n: round((_cpu_s(one) - cpu_s[n]) / seconds, 3) for n, one in processes.items()},
        "rss_mb": {n: one.memory_info().rss >> 20 for n, one in processes.items()},
        "kinds_per_s": await _kinds(bus),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _kinds(bus: Bus) -> Figures:
    """Count the messages that are published, by kind of subject."""
    found: Counter[str] = Counter()

    async def count(raw: Msg) -> None:
        found[_kind(raw.subject)] += 1

    everything = await bus.client.subscribe(">", cb=count, pending_bytes_limit=0, pending_msgs_limit=0)
    await asyncio.sleep(SUBJECTS_S)
    await everything.unsubscribe()
    figures: Figures = {}
    for kind, times in found.most_common():
        figures[kind] = round(times / SUBJECTS_S, 1)
    return figures


def _kind(subject: str) -> str:
    """Return what messages of a subject are for."""
    tokens = subject.split(".")
    if subject.startswith("$JS.API"):
        durable = tokens[-1] if tokens[-1] in ("rollout", "evaluation") else tokens[-2][:4]
        return ".".join(token for token in tokens[2:5] if token.isupper()) + f" {durable}"
    if subject.startswith("$JS.ACK"):
        return f"ack of {tokens[2].removeprefix(f'{RUN}-')}"
    if subject.startswith("sluice."):
        return ".".join(tokens[2:4]) if tokens[2] in ("rpc", "notice", "status", "events") else tokens[2]
    return tokens[0]


def _round_trip(directory: Path, stored_s: dict[int, float], load: Load) -> Figures:
    """Return how long leases took from their issue until storage had their groups, without the rollout."""
    taken, kept = [], []
    for file in directory.glob("times-*"):
        for line in file.read_text().splitlines():
            lease, issued_s, arrived_s, ended_s = line.split()
            if int(lease) in stored_s:
                taken.append(float(arrived_s) - float(issued_s))
                kept.append(stored_s[int(lease)] - float(ended_s))
    if not taken:
        return {"leases_per_s": 0.0}
    both = np.array(taken) + np.array(kept)
    spans = {"issued_to_arrived": taken, "ended_to_settled": kept, "round_trip": both}
    figures: Figures = {"leases_per_s": round(len(taken) / (load.settle_s + load.window_s + SUBJECTS_S), 1)}
    for name, values in spans.items():
        for share, percent in (("p50", 50), ("p99", 99)):
            figures[f"{name}_{share}_ms"] = round(1000 * float(np.percentile(values, percent)), 1)
    return figures


# --- the simulated learner ---


class Learner:
    """Asks for batches, trains no longer than it takes to publish the next version, and commits each step."""

    def __init__(self, bus: Bus, *, groups: int) -> None:
        self.step = 0
        self.stored_s: dict[int, float] = {}
        """When storage said that the group of a lease is complete and durable."""
        self._bus = bus
        self._groups = groups
        self._model: BlobRef | None = None

    async def begin(self, files: ModelFiles) -> None:
        """Announce version 0, with which no rollouts are wanted yet."""
        self._model = await put_only_blob(self._bus, Publisher(self._bus), encode(files), "model")
        await self._bus.listen(self._bus.subject("notice", "stored"), StoredGroups, self._on_stored)
        await self._publish(0, "warmup")

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Learn while inside."""
        resumed = LearnerResumed(step=0, incarnation=LEARNER)
        await self._bus.request(self._bus.subject("rpc", "resumed"), resumed, Done, timeout_s=READY_S)
        await self._publish(0, "rl")
        learning = asyncio.create_task(self._learn(), name="learn")
        try:
            yield
            if learning.done():
                learning.result()
        finally:
            await cancelled(learning)

    async def _learn(self) -> None:
        while True:
            request = BatchRequest(step=self.step + 1, policy_version=self.step, incarnation=LEARNER)
            subject = self._bus.subject("rpc", "batch")
            answer = await self._bus.request(subject, request, BatchLease, Waiting, timeout_s=READY_S)
            if isinstance(answer, Waiting):
                continue
            self.step += 1
            await self._publish(self.step, "rl")
            committed = StepCommitted(step=self.step, incarnation=LEARNER)
            await self._bus.request(self._bus.subject("rpc", "committed"), committed, Done, timeout_s=READY_S)

    async def _publish(self, version: int, stage: str) -> None:
        assert self._model is not None
        nowhere = BlobRef(subject="nowhere", chunks=1, size_bytes=1, digest="0")
        policy = PolicyManifest(
            policy_version=version, incarnation=LEARNER, snapshot=nowhere, model=self._model, stage=stage
        )
        await self._bus.put("policy", policy)
        await self._bus.notify(self._bus.subject("notice", "policy"), policy)

    def _on_stored(self, news: StoredGroups) -> None:
        now_s = time.time()
        for lease_id in news.lease_ids:
            self.stored_s[lease_id] = now_s


def _model_files(directory: Path) -> ModelFiles:
    """Return what storage needs to know of a model: its tokenizer, its vocabulary and its context."""
    character_tokenizer().save_pretrained(directory)
    config = {"model_type": "qwen3", "vocab_size": 200_000, "max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(config))
    return bundle(directory)


# --- the processes that are measured ---


def _run_flags(url: str, directory: Path) -> list[str]:
    return ["--bus", url, "--run", RUN, "--directory", str(directory / "runs")]


def _storage_flags(url: str, directory: Path, actors: int) -> list[str]:
    """Return the flags of a `launch storage` that leaves the shards to another process."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"prompt {n}", "label": "1"}) + "\n" for n in range(1000))
    )
    settings = {
        "prompts": prompts, "replay.shards": SHARDS, "replay.here": "none",
        "admission.max-staleness": STALENESS - 1,
        "admission.groups-per-step": max(1, actors // STALENESS), "admission.samples-per-prompt": SAMPLES,
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [*_run_flags(url, directory), *flags]


@asynccontextmanager
async def _launched(command: str, *flags: str) -> AsyncIterator[int]:
    """Run a command of `launch` while inside; yields its process id."""
    process = await asyncio.create_subprocess_exec(
        *module_command("launch", command, *flags),
        stdin=DEVNULL, stdout=DEVNULL, preexec_fn=die_with_parent(),
        env=without_setting_variables() | {"TERM": "dumb"},
    )  # fmt: skip
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(60):
            await process.wait()


@asynccontextmanager
async def _part(*arguments: str) -> AsyncIterator[int]:
    """Run one of the processes beside while inside; yields its process id once it works."""
    process = await asyncio.create_subprocess_exec(
        *module_command("benchmarks.simulated_actors", *arguments),
        stdin=PIPE, stdout=PIPE, preexec_fn=die_with_parent(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            if not await process.stdout.readline():
                raise BusError(f"the {arguments[0]} of the bench ended: see above")
        yield process.pid
    finally:
        process.stdin.close()
        if arguments[0] == "actors":  # thousands of connections take minutes to drain, and nobody needs them
            process.kill()
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            process.kill()
            raise BusAwayError(f"the {arguments[0]} of the bench did not end within 60 s") from None
