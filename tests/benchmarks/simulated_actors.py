"""The processes beside which `launch bench actors-scale` measures: simulated actors, and a screen.

`python -m benchmarks.simulated_actors actors|screen URL DIRECTORY FIRST COUNT ROLLOUT_S` is one of
them. A simulated actor has a connection of its own and runs what a real one runs on the bus: status,
counters, the follower of the policy, and the inboxes of leases and of evaluation tasks. Only its engine is
made up: weights are there at once, and a rollout is a pause.
"""

import asyncio
import os
import random
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import structlog
import uvloop
from rich.console import Console

from actors.engines.announced_version import Published
from actors.metrics.counters import report_metrics
from actors.weights.follow import PolicyFollower
from benchmarks.replay_workload import Material
from bus.codec import Json, encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.connection.reporting_rate import follow_pace
from bus.connection.status import Activity, report_status
from bus.evaluation_messages import EvaluationTask
from bus.messages import Lease
from bus.process.process_tuning import few_collections
from bus.streams.consume import Inbox, consume, consume_received
from bus.streams.publish import Publisher
from bus.streams.received import Received
from bus.topology import shard_of
from bus.trajectory import Trajectory, TrajectoryBatch
from bus.waiting import set_within
from launch.run_view.monitor import RunMonitor, RunSettings, watch
from launch.screens.terminal_view import TerminalView

if TYPE_CHECKING:
    import torch

RUN = "bench"
SHARDS = 2
SAMPLES = 2
TOKENS = 256
"""Median length of a trajectory."""
MATERIAL = 64
CONNECTING = 20
"""Actors of one process that connect at a time."""
JOINS_A_SECOND = 50
"""Actors of one process that begin in a second: hosts do not start at one moment."""


class NoEngine:
    """An engine that has announced weights at once and generates nothing."""

    policy_version = -1
    tokens_generated = 0
    running = 0

    async def load_published(self, published: Published) -> float:
        """Take the version."""
        self.policy_version = published.policy_version
        return 0.0

    async def load_weights(self, state: Mapping[str, "torch.Tensor"], policy_version: int) -> float:
        """Take the version; the tensors are ignored."""
        self.policy_version = policy_version
        return 0.0


class SimulatedActor:
    """One of the actors of this process."""

    def __init__(self, bus: Bus, name: str, material: Material, times: TextIO, *, rollout_s: float) -> None:
        self._bus = bus
        self._name = name
        self._material = material
        self._times = times
        self._rollout_s = rollout_s
        self._engine = NoEngine()
        self._follower = PolicyFollower(bus, self._engine, from_learner=True)  # type: ignore[arg-type]
        self._publisher = Publisher(bus)
        self._trajectories = 0

    async def run(self, stop: asyncio.Event, delay_s: float) -> None:
        """Act until `stop`, from a moment of its own on."""
        if await set_within(stop, delay_s):
            return
        bus, name = self._bus, self._name
        rollouts, evaluations = Inbox(bus, "TASKS", "rollout"), Inbox(bus, "TASKS", "evaluation")
        await follow_pace(bus)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follower.run(stop))
            tasks.create_task(report_status(bus, source=name, role="actor", look=self._look, stop=stop))
            tasks.create_task(report_metrics(bus, source=name, look=self._counters, stop=stop))
            tasks.create_task(
                consume_received(rollouts, bus, Lease, self._roll_out, stop=stop, concurrency=1)
            )
            tasks.create_task(
                consume(evaluations, bus, EvaluationTask, self._evaluate, stop=stop, concurrency=1)
            )

    async def _evaluate(self, task: EvaluationTask) -> None:
        raise AssertionError("the simulated learner asks for no evaluation")

    async def _roll_out(self, received: Received[Lease]) -> None:
        lease, arrived_s = received.message, time.time()
        issued_s = received.handle.raws[0].metadata.timestamp.timestamp()
        await self._follower.at_least(lease.policy_version)
        self._engine.running = lease.samples
        await asyncio.sleep(random.uniform(0.5, 1.5) * self._rollout_s)
        self._engine.running = 0
        group = self._group(lease)
        self._engine.tokens_generated += sum(len(one.token_ids) for one in group)
        ended_s = time.time()
        await self._publisher.publish(
            self._bus.subject("trajectories", shard_of(lease.lease_id, SHARDS)),
            encode(TrajectoryBatch(trajectories=group)),
            message_id=lease.group_id,
        )
        self._trajectories += len(group)
        self._times.write(f"{lease.lease_id} {issued_s} {arrived_s} {ended_s}\n")

    def _group(self, lease: Lease) -> tuple[Trajectory, ...]:
        """Return trajectories as the weights that there are would have sampled them."""
        group = []
        for sample in range(lease.samples):
            number = SAMPLES * lease.lease_id + sample
            one = self._material.trajectory(number % MATERIAL, number, lease.samples)
            versions = np.full(len(one.token_ids), self._engine.policy_version, np.int32)
            group.append(replace(one, run=lease.run, policy_versions=versions, actor=self._name))
        return tuple(group)

    def _counters(self) -> tuple[int, dict[str, Json]]:
        return max(0, self._engine.policy_version), {
            "engine/count": 1,
            "engine/busy_s": 0.0,
            "engine/tokens": self._engine.tokens_generated,
        }

    def _look(self) -> Activity:
        engine = self._engine
        values: dict[str, Json] = {
            "running": engine.running,
            "waiting": 0,
            "tokens_generated": engine.tokens_generated,
            "generated_tokens_per_s": 0.0,
            "policy_version": engine.policy_version,
            "pause_s": 0.0,
            "engines": [],
            "trajectories": self._trajectories,
        }
        if engine.running:
            return Activity("generating", values)
        return Activity("waiting for leases", values, wait="leases")


async def act(url: str, directory: Path, first: int, count: int, rollout_s: float) -> None:
    """Be `count` actors until our input ends."""
    material = Material(MATERIAL, TOKENS)
    async with AsyncExitStack() as stack:
        times = stack.enter_context((directory / f"times-{first}").open("w", buffering=1))
        slots = asyncio.Semaphore(CONNECTING)

        async def connect(number: int) -> tuple[str, Bus]:
            name = f"actor-host{number}-{number}"
            async with slots:
                bus = await stack.enter_async_context(
                    Bus.connect(BusConfig(url=url, connect_timeout_s=60), RUN, name=name)
                )
            return name, bus

        connected = await asyncio.gather(*map(connect, range(first, first + count)))
        stack.enter_context(few_collections())
        stop = _ready_until_input_ends()
        async with asyncio.TaskGroup() as tasks:
            for n, (name, bus) in enumerate(connected):
                actor = SimulatedActor(bus, name, material, times, rollout_s=rollout_s)
                tasks.create_task(actor.run(stop, n / JOINS_A_SECOND))


async def show(url: str, directory: Path) -> None:
    """Show the run on a terminal that nobody sees, as `launch local` does, until our input ends."""
    settings = RunSettings(
        name=RUN, steps=1 << 30, warmup_steps=0, max_staleness=8, samples_per_prompt=SAMPLES
    )
    monitor = RunMonitor(settings)
    with Path(os.devnull).open("w") as nowhere:  # noqa: ASYNC230 - opened once
        console = Console(file=nowhere, force_terminal=True, width=120, height=50)
        async with Bus.connect(BusConfig(url=url), RUN, name="screen") as bus:
            stop = _ready_until_input_ends()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watch(bus, monitor, stop))
                tasks.create_task(TerminalView(monitor, console).run(stop))
    seen = sum(process.status.role == "actor" for process in monitor.processes.values())
    (directory / "actors-seen").write_text(str(seen))


def _ready_until_input_ends() -> asyncio.Event:
    """Say that all is ready; the event is set when the bench closes our input."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    return stop


def main(part: str, url: str, directory: Path, *numbers: str) -> None:
    """Be one of the processes."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is a pipe
    if part == "screen":
        uvloop.run(show(url, directory))
    else:
        first, count, rollout_s = numbers
        uvloop.run(act(url, directory, int(first), int(count), float(rollout_s)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
