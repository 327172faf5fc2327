"""How far a run is by its files: every screen that does not ask the bus takes it from here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bus.codec import Json
from launch.run_view.history import History
from storage.metrics.records import integer, latest_records

TAIL_BYTES = 1 << 20
"""Bytes at the end of metrics.jsonl in which the latest step and evaluation are looked for."""


@dataclass(frozen=True)
class LatestStep:
    """The step that a run trained last."""

    stage: str
    step: int
    policy_version: int
    """Policy version that the step made."""


def latest_history(metrics: Path) -> History:
    """Return the latest steps and evaluations of a run's metrics.jsonl, which may be missing."""
    return History(latest_records(metrics, TAIL_BYTES))


def latest_step(saved: Mapping[str, Json], recorded: History) -> LatestStep:
    """Return the step of the newest checkpoint or the step recorded last, whichever is later.

    Args:
        saved: progress.json, which the learner writes with each checkpoint; empty without the file.
        recorded: by `latest_history`.
    """
    last, stage = recorded.last, saved.get("stage")
    return LatestStep(
        stage=stage if isinstance(stage, str) else "starting" if last is None else "rl",
        step=max(integer(saved, "step"), last.step if last else 0),
        policy_version=max(integer(saved, "policy_version"), last.policy_version if last else 0),
    )
