"""`launch soak`: faults are injected into a real run, then every trajectory is accounted for."""

import asyncio
import random
import time
from pathlib import Path

from actors.rewards.base import Answer
from bus.codec import Json
from bus.errors import SluiceError
from launch.chaos.faults import LocalRun
from launch.chaos.resume_check import retrain
from launch.history.trajectory_account import account
from storage.disk.run_directory import RunDirectory

RUN = "soak"
MAX_STALENESS, SHARDS, SAMPLES = 2, 2, 4
LONGEST_ANSWER = 40
FAULT_EVERY_S = 5.0
"""Average time between two faults."""
KILLS_PER_MINUTE = 4.0
START_TIMEOUT_S = 300.0
SETTLE_S = 15.0
"""Says how long the run goes on once it trains again after the last fault; what is missing then counts as
lost."""
SETTINGS = (
    "--run", RUN, "--data.task", "sort", "--reward", "launch.chaos.soak:longer",
    "--model.dtype", "float32", "--model.scratch.hidden-size", "32", "--model.scratch.layers", "1",
    "--model.scratch.heads", "2", "--model.scratch.kv-heads", "1", "--model.scratch.intermediate-size", "32",
    "--sampling.max-new-tokens", str(LONGEST_ANSWER), "--learner.steps", "1000000",
    "--learner.threads", "1", "--warmup.steps", "0",
    "--learner.optimizer.lr", "1e-4", "--learner.checkpoint.save-every", "10",
    "--evaluation.every-versions", "0", "--replay.shards", str(SHARDS),
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", str(SAMPLES),
    "--admission.max-staleness", str(MAX_STALENESS),
    "--supervision.restarts", "100000", "--supervision.longest-pause-s", "1",
)  # fmt: skip
"""float32 on one thread: the same step has the same loss, bit for bit."""


def longer(answer: Answer) -> float:
    """Reward long answers: random weights give answers of every length, so there is something to learn."""
    return answer.token_count / LONGEST_ANSWER


async def run_soak(minutes: float, seed: int, directory: Path, stop: asyncio.Event) -> dict[str, Json]:
    """Inject faults into a run, let it settle, stop it, and account for every trajectory.

    The faults go on for `minutes`, or longer until there were four kills for each of them. In the end all
    steps are trained again without a fault. No process of the run survives this function. Raises
    `SluiceError` when the run does not train, gives up, does not end, or cannot be trained again.
    """
    run = RunDirectory(directory, RUN)
    await asyncio.to_thread(lambda: directory.mkdir(parents=True, exist_ok=True))
    local = LocalRun(run, SETTINGS, random.Random(seed))
    began, kills = time.monotonic(), KILLS_PER_MINUTE * minutes
    try:
        await local.start()
        await _wait_for_a_step(local)
        deadline = time.monotonic() + 60 * minutes
        while (time.monotonic() < deadline or local.kills < kills) and not stop.is_set():
            await asyncio.sleep(local.random.expovariate(1 / FAULT_EVERY_S))
            await local.inject_fault(deadline - time.monotonic())
            local.raise_if_ended()
        await _wait_for_a_step(local)
        await asyncio.sleep(SETTLE_S)
        await local.end()
    finally:
        await local.kill()
    took_s = time.monotonic() - began  # training again waits for nobody
    return {
        "minutes": minutes,
        "seed": seed,
        "kills": local.kills,
        "faults": dict(local.faults),
        **account(run, shards=SHARDS, samples=SAMPLES, max_staleness=MAX_STALENESS),
        **await retrain(run, timeout_s=took_s),
    }


async def _wait_for_a_step(local: LocalRun) -> None:
    """Return when the run has trained another step: it runs, or has recovered from the faults."""
    deadline = time.monotonic() + START_TIMEOUT_S
    path = local.run.path / "lineage.jsonl"
    before = path.stat().st_size if path.exists() else 0
    while not path.exists() or path.stat().st_size <= before:
        local.raise_if_ended()
        if time.monotonic() > deadline:
            raise SluiceError(f"no training step within {START_TIMEOUT_S:g} s: see {local.log}")
        await asyncio.sleep(0.2)
