"""Runs one cell: a whole preset, some of whose rollouts are made to fail where the cell says so."""

import asyncio
import shutil
import time
from itertools import chain
from pathlib import Path

import xxhash

from benchmarks.learning.cells import Cell
from benchmarks.learning.outcome import Outcome, outcome_of
from benchmarks.whole_runs.comparable import comparable_settings
from benchmarks.whole_runs.run import ONE_THREAD, run_to_its_end
from launch.settings.run_config import Layer, RunConfig, merge, preset, resolve
from storage.metrics.records import older, read_records

NEVER = 1_000_000
EVALUATED_EVERY = 5
FAILING = "soak.failing_environment:FailingEnvironment"


def base_settings(name: str, given: Layer, *, steps: int) -> Layer:
    """Return the settings of all cells of a preset, under what the user gives.

    Every run has the same number of steps, also after the target, so that areas can be compared."""
    layer = preset(name)
    processes = resolve(layer).parts
    own: Layer = {
        "warmup": {"threads": 1},
        "learner": {"steps": steps, "target_accuracy": None, "checkpoint": {"save_every": NEVER}},
        "evaluation": {"every_versions": EVALUATED_EVERY},
        "supervision": {"environment": dict.fromkeys(processes, ONE_THREAD)},
    }
    return merge(layer, own, given)


def settings_of(cell: Cell, given: Layer, directory: Path, *, steps: int) -> RunConfig:
    """Return the settings of a cell. Raises `ConfigError` for those that do not fit its preset."""
    own: Layer = {"run": cell.name, "directory": directory, "seed": cell.seed}
    base = base_settings(cell.preset, given, steps=steps)
    if not cell.failures:
        return resolve(base, own)
    failing: Layer = {
        "type": "plugin",
        "environment": FAILING,
        "settings": {"environment": base["actors"]["environment"], "fraction": cell.failures},
    }
    return resolve(base, own, {"actors": {"environment": failing}})


def digest(name: str, given: Layer, *, steps: int) -> str:
    """Return a digest of the settings of all cells of a preset, with those of its task.

    Outcomes of one digest may be compared."""
    from storage.built_in_tasks.generators import GENERATOR_VERSION, TASKS

    config = resolve(base_settings(name, given, steps=steps))
    wrong = TASKS[config.data.task].wrong_share if config.data.task in TASKS else None
    parts = f"{GENERATOR_VERSION} {wrong} {comparable_settings(config)}"
    return xxhash.xxh3_64(parts.encode()).hexdigest()


async def run_cell(
    cell: Cell, config: RunConfig, stop: asyncio.Event, *, settings: str, limit_s: float
) -> Outcome:
    """Run a cell in a directory of its own, which is removed if it went well.

    Raises `SluiceError` when it fails, takes longer than `limit_s`, or on `stop`."""
    began = time.monotonic()
    run = await run_to_its_end(config, stop, limit_s=limit_s)
    records = chain.from_iterable(map(read_records, (run.metrics, older(run.counters), run.counters)))
    outcome = outcome_of(cell, records, settings=settings, wall_s=time.monotonic() - began)
    await asyncio.to_thread(shutil.rmtree, config.directory)
    return outcome
