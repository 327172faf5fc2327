"""Runs one cell: the real system, with nats-server, storage, learner and an actor of its own."""

import asyncio
import shutil
import time
from itertools import chain
from pathlib import Path

import xxhash

from benchmarks.off_policy.cells import METHODS, Cell
from benchmarks.off_policy.outcome import Outcome, outcome_of
from benchmarks.whole_runs.comparable import comparable_settings
from benchmarks.whole_runs.run import ONE_THREAD, run_to_its_end
from launch.settings.run_config import PARTS, Layer, RunConfig, merge, preset, resolve
from storage.disk.atomic_files import make_directory
from storage.metrics.records import older, read_records

NEVER = 1_000_000
LR = 5e-5
EVALUATED_EVERY = 5
WARM_UP: Layer = {
    "learner": {"steps": 1, "target_accuracy": None, "optimizer": {"lr": 1e-12}},
    "evaluation": {"every_versions": 0},
    "warmup": {"threads": 1},
}
"""The run that makes the model from which all cells begin; its single step changes no weight that counts."""
OF_MODEL = ("model", "warmup")
"""Sections that say how the initial model is made."""


def base_settings(given: Layer, model: Path, *, steps: int) -> Layer:
    """Return the settings of every cell: those of the demo, under what the user gives.

    Two updates share a batch, since PPO's clip has no effect on the first one. What is given for the warm-up
    and the model is that of `make_model`."""
    own: Layer = {
        "model": {"path": model},
        "warmup": {"steps": 0},
        "admission": {"exact_staleness": True},
        "learner": {
            "steps": steps,
            "target_accuracy": None,
            "optimizer": {"lr": LR},
            "batch": {"updates": 2},
            "checkpoint": {"save_every": NEVER},
        },
        "evaluation": {"every_versions": EVALUATED_EVERY},
        "supervision": {"environment": dict.fromkeys(PARTS, ONE_THREAD)},
    }
    return merge(preset("sort"), own, {key: given[key] for key in given if key not in OF_MODEL})


def settings_of(cell: Cell, base: Layer, directory: Path) -> RunConfig:
    """Return the settings of a cell. Raises `ConfigError` for those that do not fit the method."""
    own: Layer = {
        "run": cell.name,
        "directory": directory,
        "seed": cell.seed,
        "admission": {
            "max_staleness": cell.lag,
            "sampler": {"max_reuse": cell.reuse, "min_samples_per_insert": float(cell.reuse)},
        },
        "learner": METHODS[cell.method],
    }
    return resolve(base, own)


def digest(base: Layer, model: Path) -> str:
    """Return a digest of the settings of all cells and of the model they begin from.

    Outcomes of one digest may be compared."""
    found = xxhash.xxh3_64(comparable_settings(resolve(base, {"model": {"path": None}})).encode())
    found.update((model / "model.safetensors").read_bytes())
    return found.hexdigest()


def is_made(model: Path) -> bool:
    """Return whether the model is there from which all cells begin."""
    return (model / "config.json").exists()


async def make_model(
    model: Path, given: Layer, scratch: Path, stop: asyncio.Event, *, limit_s: float
) -> None:
    """Warm the demo's model up and keep it as `model`, unless it is there.

    Raises `SluiceError` when that fails, takes longer than `limit_s`, or on `stop`."""
    if is_made(model):
        return
    variables: Layer = {"supervision": {"environment": dict.fromkeys(PARTS, ONE_THREAD)}}
    own = {key: given[key] for key in OF_MODEL if key in given}
    config = resolve(preset("sort"), WARM_UP, variables, own, {"run": "warm-up", "directory": scratch})
    run = await run_to_its_end(config, stop, limit_s=limit_s)
    make_directory(model.parent)
    shutil.copytree(run.export, model)


async def run_cell(
    cell: Cell, base: Layer, scratch: Path, stop: asyncio.Event, *, settings: str, limit_s: float
) -> Outcome:
    """Run a cell in a directory of its own below `scratch`, which is removed if it went well.

    Raises `SluiceError` when it fails, takes longer than `limit_s`, or on `stop`."""
    began, directory = time.monotonic(), scratch / cell.name
    run = await run_to_its_end(settings_of(cell, base, directory), stop, limit_s=limit_s)
    records = chain.from_iterable(map(read_records, (run.metrics, older(run.counters), run.counters)))
    outcome = outcome_of(cell, records, settings=settings, wall_s=time.monotonic() - began)
    await asyncio.to_thread(shutil.rmtree, directory)
    return outcome
