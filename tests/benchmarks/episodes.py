"""Tells whether one actor process bears thousands of episodes of many turns, on a scripted engine.

`launch bench episodes` prints the figures: by how much the event loop was late, the memory of an episode, and
how many episodes were lost on the way from the lease to the trajectory on the bus, by the actor's account.
Each turn has the policy's answer and a further message; the bus is a nats-server of its own.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop

from actors.engines.base import Generation, GenerationRequest, Sampling
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts.worker import Worker, WorkerParts
from actors.settings.groups import InterruptionConfig
from actors.weights.follow import PolicyFollower
from benchmarks.episode_kinds import ANSWERS, QUESTION, REPOSITORY, Kind, environment_of
from benchmarks.run_bus import make_run
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import Json, encode
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError, EngineError
from bus.messages import Lease, Prompt
from bus.process.process_tuning import few_collections, quick_turns
from bus.server.nats_server import NatsServer
from bus.streams.publish import Publisher
from bus.topology import trajectories_stream
from bus.waiting import cancelled
from launch.settings.run_config import resolve
from launch.verify.comparison import Verdicts
from launch.verify.verify import verified
from learner.initial.scratch_model import character_tokenizer
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger import Ledger
from storage.shard.server import Shard
from storage.store.replay import ReplayStore

SAMPLES = 8
"""Rollouts of each prompt."""
LAG_PERIOD_S = 0.005
WANTED_LAG_MS = 50.0
STORE_TIMEOUT_S = 120.0
Report = dict[str, float | int | bool]


@dataclass(frozen=True)
class EpisodesLoad:
    """Says how much is asked for."""

    episodes: int = 2000
    """Episodes that run at once."""
    turns: int = 20
    turn_s: float = 3.0
    """Mean time that the engine takes for an answer."""
    kind: Kind = "chat"
    keep_turns_every_s: float = 60.0
    """Time between two moments at which new turns are stored. Episodes of an hour store them 60 times: where
    the engine takes no time, a shorter one makes shorter episodes do so, too."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot be asked for."""
        if self.episodes < SAMPLES or self.episodes % SAMPLES:
            raise ConfigError(f"--episodes {self.episodes}: give a multiple of {SAMPLES}")
        if self.turns < 1 or self.turn_s < 0:
            raise ConfigError(
                f"--turns {self.turns} of --turn-s {self.turn_s:g}: give a turn at least, and no time below 0"
            )

    @property
    def groups(self) -> int:
        """Return the number of prompts."""
        return self.episodes // SAMPLES

    @property
    def timeout_s(self) -> float:
        """Return the time in which all must have ended: half an hour above twice what the engine takes."""
        return 1800 + 2 * self.turns * self.turn_s


class TimedEngine(ScriptedEngine):
    """A scripted engine that takes its time for an answer, some longer than others."""

    def __init__(self, answers: Sequence[Sequence[int]], turn_s: float) -> None:
        super().__init__(lambda _: answers[self.tokens_generated % len(answers)])
        self._turn_s = turn_s
        self._random = np.random.default_rng(0)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue `request` after a while."""
        if self._turn_s:
            await asyncio.sleep(self._turn_s * self._random.uniform(0.5, 1.5))
        generation = await super().generate(request)
        self.requests.clear()  # they would count as the episodes' memory
        return generation


def bench_episodes(load: EpisodesLoad) -> Report:
    """Return lag, memory and losses of one actor process."""
    return uvloop.run(_bench(load))


async def _bench(load: EpisodesLoad) -> Report:
    tokenizer = character_tokenizer()
    encoded = (tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS[load.kind])
    engine = TimedEngine([[*answer, tokenizer.eos_token_id] for answer in encoded], load.turn_s)
    policy = Policy(engine, tokenizer, Sampling(max_new_tokens=128))
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as directory:
        async with (
            NatsServer(Path(directory)) as server,
            Bus.connect(BusConfig(url=server.url), "bench", name="bench") as bus,
            environment_of(load.kind, load.turns, load.episodes) as environment,
        ):
            await make_run(bus)
            await _offer(bus, load)
            account = Path(directory) / "account"
            parts = WorkerParts(
                account=account, interruption=InterruptionConfig(keep_turns_every_s=load.keep_turns_every_s)
            )
            worker = Worker(
                bus, policy, environment, parts, follower=PolicyFollower(bus, engine),
                keep=load_filter("none"), shards=1, name="bench",
            )  # fmt: skip
            with few_collections(), quick_turns():
                report = await _measured(bus, worker, load)
            tokens, verdicts = await _stored(bus, load, Path(directory), account)
            return {
                **report,
                "lost": load.episodes - len(tokens),
                "verified": not verdicts.is_broken and verdicts.totals["acknowledged"] == load.episodes,
                "tokens_per_episode": round(sum(tokens) / max(1, len(tokens))),
            }


async def _offer(bus: Bus, load: EpisodesLoad) -> None:
    publisher = Publisher(bus)
    for group in range(load.groups):
        files: dict[str, Json] = {"sandbox_files": REPOSITORY}
        prompt = Prompt(content=f"prompt {group}: {QUESTION}", label="1", metadata=files)
        lease = Lease(lease_id=group, prompt=prompt, samples=SAMPLES, policy_version=0)
        subject = bus.subject("tasks", "rollout")
        await publisher.publish(subject, encode(lease), message_id=f"lease-{group}")


async def _measured(bus: Bus, worker: Worker, load: EpisodesLoad) -> Report:
    """Run all episodes at once; watch the loop and the memory meanwhile."""
    stop, lag, process = asyncio.Event(), list[float](), psutil.Process()
    gc.collect()
    memory = [process.memory_info().rss]
    watching = [asyncio.create_task(_watch_lag(lag)), asyncio.create_task(_watch_memory(process, memory))]
    began, cpu = time.monotonic(), time.process_time()
    working = asyncio.create_task(worker.run(stop, groups_at_once=load.groups))
    try:
        async with asyncio.timeout(load.timeout_s):
            while worker.counts["groups"] + worker.counts["rejected"] < load.groups:
                if working.done():
                    working.result()
                    raise EngineError("the worker ended before its episodes did: see what was logged before")
                await asyncio.sleep(0.1)
        took_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        memory.append(process.memory_info().rss)
    finally:
        await cancelled(*watching)
        stop.set()
        await working
    p50, p99 = np.percentile(np.array(lag) * 1e3, [50, 99])
    turns = load.episodes * load.turns
    return {
        "episodes": load.episodes,
        "turns": load.turns,
        "event_loop_lag_p50_ms": round(float(p50), 2),
        "event_loop_lag_p99_ms": round(float(p99), 2),
        "event_loop_lag_max_ms": round(max(lag) * 1e3, 2),
        "lag_is_as_wanted": bool(p99 < WANTED_LAG_MS),
        "memory_per_episode_kib": round((max(memory) - memory[0]) / load.episodes / 1024, 1),
        "cpu_per_turn_ms": round(cpu_s * 1e3 / turns, 3),
        "turns_per_s": round(turns / took_s, 1),
        "seconds": round(took_s, 1),
    }


async def _stored(bus: Bus, load: EpisodesLoad, directory: Path, account: Path) -> tuple[list[int], Verdicts]:
    """Have a shard store what is on the bus, and compare it with the actor's account as `launch verify` does.

    Returns the tokens of each episode that is there with all its turns, and the verdicts."""
    run, stop = RunDirectory(directory, "bench"), asyncio.Event()
    settings = {
        "run": "bench",
        "directory": str(directory),
        "data": {"task": "sort"},
        "replay": {"shards": 1},
    }
    run.config.write_text(resolve(settings).model_dump_json())
    with closing(Ledger.open(run.ledger)) as ledger, closing(ReplayStore.open(run.replay(0))) as store:
        leases = ledger.issue(load.groups, 0)
        shard = Shard(bus, store, 0, shards=1, was_issued=lambda _: True, linger_s=0.02)
        storing = asyncio.create_task(shard.run(stop))
        stream = bus.topology.stream(trajectories_stream(0))
        async with asyncio.timeout(STORE_TIMEOUT_S):
            while not storing.done():
                if not (await bus.js.stream_info(stream)).state.messages:
                    break
                await asyncio.sleep(LAG_PERIOD_S)
        stop.set()
        await storing
        found = [one for lease in leases for one in store.trajectories_of(lease)]
        verdicts = await verified(run, [account], bus=bus)
    return [len(one.token_ids) for one in found if len(one.turns) == load.turns], verdicts


async def _watch_lag(lag: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        lag.append(time.perf_counter() - due)


async def _watch_memory(process: psutil.Process, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(0.5)
        memory.append(process.memory_info().rss)
