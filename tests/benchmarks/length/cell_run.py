"""Runs one cell: the real system, from the warm-up on, on the task of dots."""

import asyncio
import shutil
import time
from pathlib import Path

import xxhash

from benchmarks.length.cells import CUT_OFF, METHODS, Cell
from benchmarks.length.outcome import Outcome, outcome_of
from benchmarks.length.task import LIMIT, VERSION, write_task
from benchmarks.whole_runs.comparable import comparable_settings
from benchmarks.whole_runs.run import ONE_THREAD, run_to_its_end
from launch.settings.run_config import PARTS, Layer, RunConfig, merge, resolve
from storage.metrics.records import read_records

NEVER = 1_000_000
LR = 3e-4
EVALUATED_EVERY = 5
REWARD = "benchmarks.length.task:score"


def base_settings(given: Layer, *, steps: int) -> Layer:
    """Return the settings of every cell, under what the user gives.

    Two updates share a batch, since PPO's clip has no effect on the first one on-policy."""
    own: Layer = {
        "admission": {"groups_per_step": 16, "samples_per_prompt": 8, "exact_staleness": True},
        "sampling": {"max_new_tokens": LIMIT},
        "model": {
            "dtype": "float32",
            "scratch": {
                "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2,
                "context": 32,
            },
        },
        "warmup": {"steps": 100, "threads": 1, "optimizer": {"lr": 2e-3, "warmup_steps": 10}},
        "learner": {
            "steps": steps,
            "target_accuracy": None,
            "publish_dtype": "float32",
            "optimizer": {"lr": LR, "warmup_steps": 5},
            "batch": {"updates": 2},
            "checkpoint": {"save_every": NEVER},
        },
        "evaluation": {"every_versions": EVALUATED_EVERY},
        "actors": {"groups_at_once": 32, "environment": {"reward": REWARD}},
        "supervision": {"environment": dict.fromkeys(PARTS, ONE_THREAD)},
    }  # fmt: skip
    return merge(own, given)


def settings_of(cell: Cell, base: Layer, directory: Path) -> RunConfig:
    """Return the settings of a cell, whose task `write_task` writes to `task` in the directory.

    Raises `ConfigError` for those that do not fit the method."""
    task = directory / "task"
    own: Layer = {
        "run": cell.name,
        "directory": directory,
        "seed": cell.seed,
        "data": {"prompts": task / "prompts.jsonl", "heldout": task / "heldout.jsonl"},
        "warmup": {"demonstrations": task / "demonstrations.jsonl"},
        "admission": {"max_staleness": cell.lag},
        "learner": {**METHODS[cell.method], **CUT_OFF[cell.cut_off]},
    }
    return resolve(base, own)


def digest(base: Layer) -> str:
    """Return a digest of the settings of all cells and of their task.

    Outcomes of one digest may be compared."""
    anywhere: Layer = {"warmup": {"demonstrations": "demonstrations.jsonl"}}  # each cell writes its own
    settings = comparable_settings(resolve(base, anywhere))
    return xxhash.xxh3_64(f"{VERSION} {settings}".encode()).hexdigest()


async def run_cell(
    cell: Cell, base: Layer, scratch: Path, stop: asyncio.Event, *, settings: str, limit_s: float
) -> Outcome:
    """Run a cell in a directory of its own below `scratch`, which is removed if it went well.

    Raises `SluiceError` when it fails, takes longer than `limit_s`, or on `stop`."""
    began, directory = time.monotonic(), scratch / cell.name
    await asyncio.to_thread(write_task, directory / "task", seed=cell.seed)
    run = await run_to_its_end(settings_of(cell, base, directory), stop, limit_s=limit_s)
    outcome = outcome_of(cell, read_records(run.metrics), settings=settings, wall_s=time.monotonic() - began)
    await asyncio.to_thread(shutil.rmtree, directory)
    return outcome
