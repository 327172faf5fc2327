"""A run whose newest segments were damaged while it was stopped, tried on copies of its directory."""

import asyncio
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from bus.codec import Json
from bus.errors import SluiceError
from launch.process.runtime import LOST_DATA
from learner.progress import lineage
from soak.bus_faults import damage
from soak.local_run import LocalRun
from storage.disk.run_directory import RunDirectory

GOES_ON_STEPS = 3
DAMAGES = ("flipped", "deleted")
PATIENCE_S = 180.0
LOOK_S = 0.2


async def check_segments(
    run: RunDirectory, settings: Sequence[str], *, shards: int, seed: int
) -> dict[str, Json]:
    """Return what happened, by damage: the run trained on, or said that its data are lost, or did neither.

    The run must have ended. Its directory stays as it is."""
    return {how: await _outcome(run, settings, how, shards, random.Random(seed)) for how in DAMAGES}


def segments_broken(outcomes: dict[str, Json]) -> list[str]:
    """Return what is no outcome that is promised."""
    promised = f"trained {GOES_ON_STEPS} more steps", f"ended with status {LOST_DATA}"
    return [f"a segment {how}: {outcome}" for how, outcome in outcomes.items() if outcome not in promised]


async def _outcome(
    run: RunDirectory, settings: Sequence[str], how: str, shards: int, draw: random.Random
) -> str:
    """Damage the newest segment of each shard of a copy, start the copy, and see."""
    root = run.path.parent / f"segment-{how}"
    copy = RunDirectory(root, run.name)
    try:
        await asyncio.to_thread(shutil.copytree, run.path, root / run.name)
        for shard in range(shards):
            newest = _newest_segment(copy.replay(shard))
            if how == "deleted":
                shutil.rmtree(newest)
            else:
                damage(max(newest.rglob("*"), key=lambda path: path.stat().st_size), how, draw)
        return await _started(copy, settings)
    finally:
        await asyncio.to_thread(shutil.copytree, copy.logs, run.path / f"logs-segment-{how}")
        await asyncio.to_thread(shutil.rmtree, root)


async def _started(copy: RunDirectory, settings: Sequence[str]) -> str:
    local = LocalRun(copy, settings)
    path = copy.path / "lineage.jsonl"
    wanted = max(lineage.steps(path)) + GOES_ON_STEPS
    deadline = time.monotonic() + PATIENCE_S
    try:
        await local.start()
        while local.process is None or local.process.returncode is None:
            if max(lineage.steps(path)) >= wanted:
                await local.end()
                return f"trained {GOES_ON_STEPS} more steps"
            if time.monotonic() > deadline:
                return f"neither trained on nor ended within {PATIENCE_S:g} s"
            await asyncio.sleep(LOOK_S)
    except SluiceError as error:
        return str(error)
    else:
        return f"ended with status {local.process.returncode}"
    finally:
        await local.kill(patience_s=0)


def _newest_segment(replay: Path) -> Path:
    segments = sorted(replay.glob("segment*"), key=lambda path: path.stat().st_mtime)
    if not segments:
        raise SluiceError(f"{replay} has no segment")
    return segments[-1]
