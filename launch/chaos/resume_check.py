"""Is the loss continuous over resumes? All that a run trained, again in one process without a break."""

import asyncio
import json

from bus.child_process import module_command
from bus.codec import Json
from bus.errors import SluiceError
from learner import lineage
from storage.disk.run_directory import RunDirectory

START_S = 120.0
"""Imports and the initial model."""


async def retrain(run: RunDirectory, *, timeout_s: float) -> dict[str, Json]:
    """Train a run that has ended again from step 0, and compare with what its learners noted step by step.

    `launch retrain` does it in a process of its own. `timeout_s` is for the training alone. Raises
    `SluiceError` when that is not enough, or when a step cannot be trained again.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command("launch", "retrain", "--json", "--run", run.name),
        *("--directory", str(run.path.parent)),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S + timeout_s):
            output, complaint = await process.communicate()
    except TimeoutError:
        raise SluiceError(f"{run.path} was not trained again within {START_S + timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not output:
        raise SluiceError(f"{run.path} could not be trained again:\n{complaint.decode(errors='replace')}")
    report = json.loads(output)  # also with status 1, of batches that differ
    return {
        "resumes": lineage.resumes(run.path / "lineage.jsonl"),
        "retrained_batches": report["batches"],
        "retrained_batches_equal": report["batches_equal"],
        "loss_max_abs_diff": report["loss_max_abs_diff"],
    }
