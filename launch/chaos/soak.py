"""`launch soak`: a real run whose processes are killed at random, and the account of everything after."""

import asyncio
import random
import time
from pathlib import Path

from actors.rewards.base import Answer
from bus.codec import Json
from bus.errors import SluiceError
from launch.chaos.faults import Victim
from launch.chaos.resume_check import retrain
from launch.history.trajectory_account import account
from storage.disk.run_directory import RunDirectory

RUN = "soak"
MAX_STALENESS, SHARDS, SAMPLES = 2, 2, 4
LONGEST_ANSWER = 40
HARM_EVERY_S = 5.0
"""On average."""
KILLS_PER_MINUTE = 4.0
START_TIMEOUT_S = 300.0
SETTLE_S = 15.0
"""Once the run trains again after the last fault, it goes on for so long; what is not back then is lost."""
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
    """The soak's reward: answers of every length occur, and there is something to learn."""
    return answer.token_count / LONGEST_ANSWER


async def run_soak(minutes: float, seed: int, directory: Path, stop: asyncio.Event) -> dict[str, Json]:
    """Harm a run for so long, four kills a minute at least; let it settle, stop it, account for everything.

    In the end all its steps are trained again, uninterrupted. Nothing of the run is left running, whatever is
    raised: `SluiceError` when it does not train, gives up, does not end, or cannot be trained again.
    """
    run = RunDirectory(directory, RUN)
    await asyncio.to_thread(lambda: directory.mkdir(parents=True, exist_ok=True))
    victim = Victim(run, SETTINGS, random.Random(seed))
    began, kills = time.monotonic(), KILLS_PER_MINUTE * minutes
    try:
        await victim.start()
        await _training(victim)
        deadline = time.monotonic() + 60 * minutes
        while (time.monotonic() < deadline or victim.kills < kills) and not stop.is_set():
            await asyncio.sleep(victim.random.expovariate(1 / HARM_EVERY_S))
            await victim.harm(deadline - time.monotonic())
            victim.refuse_end()
        await _training(victim)
        await asyncio.sleep(SETTLE_S)
        await victim.end()
    finally:
        await victim.kill()
    took_s = time.monotonic() - began  # training again waits for nobody
    return {
        "minutes": minutes,
        "seed": seed,
        "kills": victim.kills,
        "faults": dict(victim.faults),
        **account(run, shards=SHARDS, samples=SAMPLES, max_staleness=MAX_STALENESS),
        **await retrain(run, timeout_s=took_s),
    }


async def _training(victim: Victim) -> None:
    """Return when the run has trained another step: so faults hit something, and leave nobody stuck."""
    deadline = time.monotonic() + START_TIMEOUT_S
    path = victim.run.path / "lineage.jsonl"
    before = path.stat().st_size if path.exists() else 0
    while not path.exists() or path.stat().st_size <= before:
        victim.refuse_end()
        if time.monotonic() > deadline:
            raise SluiceError(f"no training step within {START_TIMEOUT_S:g} s: see {victim.log}")
        await asyncio.sleep(0.2)
