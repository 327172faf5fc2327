"""What the losses and the weights of an ended run tell: all that it trained, again without a break."""

import asyncio
import json
from typing import Any

from bus.codec import Json
from bus.errors import SluiceError
from bus.process.child_process import module_command
from learner.progress import lineage
from storage.disk.run_directory import RunDirectory

START_S = 120.0
"""Imports and the initial model."""


async def retrain(run: RunDirectory, *, timeout_s: float) -> dict[str, Json]:
    """Train a run that has ended again from step 0, and compare with what its learners noted step by step,
    and with the weights of its last checkpoint.

    Raises `SluiceError` when `timeout_s` is not enough, or when a step cannot be trained again.
    """
    report = await _reported("retrain", run, timeout_s)
    return {
        "resumes": lineage.resumes(run.path / "lineage.jsonl"),
        "retrained_batches": report["batches"],
        "retrained_batches_equal": report["batches_equal"],
        "loss_max_abs_diff": report["loss_max_abs_diff"],
        "weights_max_abs_diff": report["weights_max_abs_diff"],
    }


async def ask_witness(run: RunDirectory, *, timeout_s: float) -> dict[str, Json]:
    """Return what the weights tell of how often the run's newest group with differing rewards was trained on.

    Raises `SluiceError` when `timeout_s` is not enough, or when there is no such group."""
    report = await _reported("witness", run, timeout_s)
    return {"witness": {key: report[key] for key in ("lease", "step", "trained", "weights_max_abs_diff")}}


async def _reported(command: str, run: RunDirectory, timeout_s: float) -> dict[str, Any]:
    """Return the report of a `launch` command on an ended run, in a process of its own.

    `timeout_s` is for its work alone."""
    process = await asyncio.create_subprocess_exec(
        *module_command("launch", command, "--json", "--run", run.name),
        *("--directory", str(run.path.parent)),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S + timeout_s):
            output, complaint = await process.communicate()
    except TimeoutError:
        raise SluiceError(
            f"launch {command} of {run.path} did not end within {START_S + timeout_s:g} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not output:
        raise SluiceError(f"launch {command} of {run.path} failed:\n{complaint.decode(errors='replace')}")
    report: dict[str, Any] = json.loads(output)  # also with status 1, of an answer that is not as promised
    return report
