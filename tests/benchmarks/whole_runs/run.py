"""Runs the real system as a benchmark's cell: `launch local` in a child process, until it ends by itself."""

import asyncio
import json
import shutil
from pathlib import Path

from bus.errors import SluiceError
from bus.waiting import ended_before
from launch.run_view.run_files import RunFiles
from launch.settings.run_config import RunConfig
from soak.local_run import LocalRun
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory

ONE_THREAD = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of every process of a cell: so many run at once that each may use one core, and no GPU."""


async def run_to_its_end(config: RunConfig, stop: asyncio.Event, *, limit_s: float) -> RunDirectory:
    """Run `launch local` until it ends by itself, and return its directory.

    Raises `SluiceError`, with the end of its output, when it fails, takes longer than `limit_s`, or on
    `stop`. A run that does not end is killed."""
    shutil.rmtree(config.directory / config.run, ignore_errors=True)  # of a call that was interrupted
    run = RunDirectory(config.directory, config.run)
    given = run.path.parent / f"{config.run}.json"
    write_json(given, json.loads(config.model_dump_json(exclude={"bus"})))
    local = LocalRun(run, ("--config", str(given)), log_name=f"{config.run}.log")
    try:
        await local.start()
        if local.process is None:
            raise SluiceError(f"{config.run} was not started")
        ending = asyncio.create_task(local.process.wait())
        async with asyncio.timeout(limit_s):
            if not await ended_before(stop, ending):
                ending.cancel()
                raise SluiceError(f"{config.run} was stopped")
        if ending.result() != 0:
            raise SluiceError(f"{config.run} ended with status {ending.result()}: {_last_words(local.log)}")
        _refuse_stopped(run)
    except TimeoutError:
        raise SluiceError(
            f"{config.run} took longer than {limit_s:.0f} s: {_last_words(local.log)}"
        ) from None
    finally:
        await local.kill(patience_s=0)
    return run


def _refuse_stopped(run: RunDirectory) -> None:
    """Raise `SluiceError` for a run that ended well before it was done, as one does that gets SIGTERM."""
    progress = RunFiles(run.path).progress or {}
    if progress.get("stage") != "done":
        raise SluiceError(f"{run.name} was stopped from elsewhere, at step {progress.get('step', 0)}")


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else "it wrote nothing"
