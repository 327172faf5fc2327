"""`launch soak`: faults are injected into a real run, then every trajectory is accounted for."""

import asyncio
import random
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bus.codec import Json
from bus.errors import SluiceError
from bus.waiting import set_within
from launch.verify.comparison import Verdicts
from launch.verify.verify import verified
from soak.bus_faults import bus_faults, kill_leader
from soak.clock import ShiftedClock
from soak.disk import small_disk
from soak.faults import Fault, Target, inject_one
from soak.local_run import LocalRun
from soak.lost_with_bus import LostWithBus
from soak.paced_lengths import LONGEST, expected_lengths
from soak.resume_check import ask_witness, retrain
from soak.run_faults import RUN_FAULTS
from soak.segment_check import check_segments, segments_broken
from soak.servers import BusServers
from soak.trajectory_account import account, each_trajectory, ks_p
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger_reader import leases_of_steps
from storage.store.replay import ReplayStore

RUN = "soak"
MAX_STALENESS, SHARDS, SAMPLES = 2, 2, 4
FAULT_EVERY_S = 6.0
"""Average time between two faults of the run, and between two of the bus."""
FAULTS_PER_MINUTE = 7.0
TRAINED_BEFORE_SHARE = 0.5
"""Share of the run's faults that strike it after another step; the others may strike it while it recovers."""
RECOVERY_S = 30.0
"""Longest wait for that step."""
LEADER_EVERY_S = 60.0
"""Time between two deaths of a cluster's leader."""
NO_LEADER_S = 5.0
"""Time until a cluster that had no leader is asked again."""
START_TIMEOUT_S = 300.0
SETTLE_S = 15.0
"""Says how long the run goes on once it trains again after the last fault; what is missing then counts as
lost."""
STREAMS = ("tasks", "trajectories", "outcomes", "weights", "files", "events", "dead")
SETTINGS = (
    "--run", RUN, "--data.task", "sort", "--actors.environment.type", "plugin",
    "--actors.environment.environment", "soak.paced_lengths:PacedLengths",
    "--model.dtype", "float32", "--model.scratch.hidden-size", "32", "--model.scratch.layers", "1",
    "--model.scratch.heads", "2", "--model.scratch.kv-heads", "1", "--model.scratch.intermediate-size", "32",
    "--sampling.max-new-tokens", str(LONGEST), "--learner.steps", "1000000",
    "--learner.threads", "1", "--warmup.steps", "0",
    "--learner.optimizer.lr", "1e-4", "--learner.checkpoint.save-every", "10",
    "--evaluation.every-versions", "0", "--replay.shards", str(SHARDS),
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", str(SAMPLES),
    "--admission.max-staleness", str(MAX_STALENESS),
    *(f for name in STREAMS for f in (f"--bus.streams.{name}-mib", "64")),
    "--allow.insecure",  # its bus is reached through proxies, which do not look like a server of this host
    "--supervision.restarts", "100000", "--supervision.longest-pause-s", "1",
)  # fmt: skip
"""float32 on one thread: the same step has the same loss, bit for bit."""


@dataclass(frozen=True)
class SoakPlan:
    """What a soak does."""

    minutes: float
    """How long faults are injected; it goes on until there were `FAULTS_PER_MINUTE` for each of them."""
    seed: int
    outages_s: tuple[float, float]
    """Shortest and longest time for which the bus is away."""
    servers: int = 1
    """Servers of the bus; three are a cluster whose streams have three replicas each."""


async def run_soak(plan: SoakPlan, directory: Path, stop: asyncio.Event) -> dict[str, Json]:
    """Inject faults into a run and its bus, let it settle, stop it, and account for every trajectory.

    In the end all steps are trained again without a fault. No process of the run survives this function.
    Raises `SluiceError` when the run does not train, gives up, does not end, or cannot be trained again.
    """
    began = time.monotonic()
    with small_disk(directory / "disk") as mounted:
        target, verdicts = await _soaked(plan, directory, stop, disk_fills=mounted)
        if mounted:
            await asyncio.to_thread(shutil.copytree, target.local.run.path, directory / RUN)
    run = RunDirectory(directory if mounted else directory / "disk", RUN)
    took_s = time.monotonic() - began
    found = await accounted(run, took_s, verdicts=verdicts)
    damaged = await check_segments(run, SETTINGS, shards=SHARDS, seed=plan.seed)
    return {
        "minutes": plan.minutes,
        "seed": plan.seed,
        "servers": plan.servers,
        "faults": sum(target.faults.values()),
        "faults_by_kind": dict(sorted(target.faults.items())),
        "damaged_segments": damaged,
        "restarts_with_status_75": target.local.restarts,
        "broken_promises": [*target.broken, *segments_broken(damaged)],
        **found,
    }


async def accounted(
    run: RunDirectory, took_s: float, *, until_lease: int | None = None, verdicts: Verdicts | None = None
) -> dict[str, Json]:
    """Account for every trajectory of a run that has ended, and train its steps again.

    Args:
        took_s: duration of the run; training again waits for nobody, and so may take as long at most.
        until_lease: bound of the leases whose lengths are compared with the known ones; None for all.
        verdicts: the account by id and digest; None to take it from the run's directory alone.

    Raises `SluiceError` when something to compare is missing, or when it cannot be trained again.
    """
    verdicts = verdicts or await verified(run)
    return {
        "verify": verdicts.to_json(),
        **account(run, shards=SHARDS, samples=SAMPLES, max_staleness=MAX_STALENESS),
        "known_length_ks_p": known_length_p(run, until_lease),
        **await retrain(run, timeout_s=took_s),
        **await ask_witness(run, timeout_s=took_s),
    }


async def _soaked(
    plan: SoakPlan, directory: Path, stop: asyncio.Event, *, disk_fills: bool
) -> tuple[Target, Verdicts]:
    """Let a run go through its faults, and to its end; return its account of every trajectory too."""
    disk = directory / "disk"
    clock = ShiftedClock(directory)
    servers = BusServers(disk / "bus", plan.servers)
    local = LocalRun(RunDirectory(disk, RUN), _settings(servers, clock))
    lost = LostWithBus(local.run, servers.url)
    draw = random.Random(plan.seed)
    target = Target(local, servers, disk, disk_fills, clock, plan.outages_s, draw, lost, SHARDS)
    try:
        async with servers.running():
            try:
                await local.start()
                await wait_for_a_step(local)
                await _inject(target, plan.minutes, stop)
                await wait_for_a_step(local)
                await asyncio.sleep(SETTLE_S)
                await local.end()
                found = await lost.take_account()
            finally:
                target.slow_consumers.close()
                await local.kill()
    finally:
        await asyncio.to_thread(_keep_logs, disk, local, directory)
    if found is None:
        raise SluiceError("the account of the run's trajectories could not be taken: its bus was away")
    for name, why in lost.lost.items():
        found.add("lost", name, why)
    return target, found


def _keep_logs(disk: Path, local: LocalRun, directory: Path) -> None:
    """Copy what the processes have logged from a disk that is about to vanish."""
    for log in (local.log, *local.run.logs.glob("*"), *(disk / "bus").rglob("nats.log*")):
        if log.is_file():
            kept = directory / "logs" / log.relative_to(disk)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, kept)


async def _inject(target: Target, minutes: float, stop: asyncio.Event) -> None:
    """Inject faults into the run and, at the same time, into its bus."""
    deadline = time.monotonic() + 60 * minutes

    def goes_on() -> bool:
        few = sum(target.faults.values()) < FAULTS_PER_MINUTE * minutes
        return (time.monotonic() < deadline or few) and not stop.is_set()

    async def keep_injecting(table: tuple[Fault, ...]) -> None:
        while goes_on():
            await asyncio.sleep(target.random.expovariate(1 / FAULT_EVERY_S))
            if table is RUN_FAULTS and target.random.random() < TRAINED_BEFORE_SHARE:
                await _trained_within(target.local, RECOVERY_S)
            await inject_one(target, table, deadline - time.monotonic())
            if table is RUN_FAULTS:  # the others may see it between its death and its restart
                await target.local.go_on()

    async def keep_killing_leaders() -> None:
        while goes_on():
            pause_s = LEADER_EVERY_S if await kill_leader(target) else NO_LEADER_S
            await set_within(stop, min(pause_s, max(0.0, deadline - time.monotonic())))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_injecting(RUN_FAULTS))
        tasks.create_task(keep_injecting(bus_faults(target)))
        if len(target.servers.servers) > 1:
            tasks.create_task(keep_killing_leaders())


def _settings(servers: BusServers, clock: ShiftedClock) -> tuple[str, ...]:
    """Return the flags of the run."""
    given = [*SETTINGS, "--bus.url", servers.url, "--bus.streams.replicas", str(len(servers.servers))]
    for part in ("storage", "actors", "learner"):
        for name, value in clock.variables.items():
            given += [f"--supervision.environment.{part}.{name}", value]
    return tuple(given)


def known_length_p(run: RunDirectory, until_lease: int | None = None) -> float:
    """Return the p-value of the test that what was trained has the lengths that rollouts are known to have.

    Leases from `until_lease` on are left out. Raises `SluiceError` when a trained group cannot be read."""
    leases = {lease for leases in leases_of_steps(run.ledger).values() for lease in leases}
    groups = {lease for lease in leases if until_lease is None or lease < until_lease}
    lengths = []
    for shard in range(SHARDS):
        with closing(ReplayStore.open(run.replay(shard), writable=False)) as store:
            trained = groups.intersection(store.completed)
            lengths += [int(t.loss_mask.sum()) for t in each_trajectory(store, trained)]
    return ks_p(np.array(lengths), expected_lengths(len(lengths)))


async def wait_for_a_step(local: LocalRun) -> None:
    """Return when the run has trained another step: it runs, or has recovered from the faults."""
    if not await _trained_within(local, START_TIMEOUT_S):
        raise SluiceError(
            f"no training step within {START_TIMEOUT_S:g} s: see {local.log_name} and the parts' logs below "
            "logs in the soak's directory"
        )


async def _trained_within(local: LocalRun, timeout_s: float) -> bool:
    """Wait for another step of the run for at most the given time; return whether there was one."""
    deadline = time.monotonic() + timeout_s
    path = local.run.path / "lineage.jsonl"
    before = path.stat().st_size if path.exists() else 0
    while not path.exists() or path.stat().st_size <= before:
        await local.go_on()
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.2)
    return True
