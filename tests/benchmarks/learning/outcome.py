"""What a run of one cell was like: its held-out curve, and what became of its rollouts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from benchmarks.learning.cells import Cell
from benchmarks.whole_runs.curves import smoothed, steps_to_target
from benchmarks.whole_runs.results import OutcomeLine
from bus.actor_counters import FAILED_EPISODES
from bus.errors import SluiceError
from storage.metrics.records import Record, integer, is_counters, number

TARGET = 0.9
"""Held-out reward that the steps and seconds are counted up to."""
DIGITS = 4
ENDS = 3
"""Evaluations at the end whose mean is the end of a curve."""


@dataclass(frozen=True, kw_only=True)
class Outcome(OutcomeLine):
    """The curve of one cell, and its counts."""

    preset: str
    failures: float
    seed: int
    settings: str
    """Digest of all settings of the preset's cells but those of the cell."""
    wall_s: float
    steps: tuple[int, ...]
    """Steps of reinforcement learning whose weights answered the held-out prompts."""
    sampled: tuple[float, ...]
    """Held-out reward of each of them, at the temperature of training; failed rollouts are left out."""
    greedy: tuple[float, ...]
    seconds: tuple[float, ...]
    """When each of them was known, in seconds from the first record, so with the warm-up."""
    sampled_trajectories: int
    """Trajectories of the policy that the actors sampled for training."""
    trained_trajectories: int
    """Trajectories that were trained on."""
    episodes: int
    """Rollouts for training."""
    failed_episodes: int
    """Rollouts for training that something around the policy failed."""

    @property
    def cell(self) -> Cell:
        """Return which cell it is of."""
        return Cell(self.seed, self.preset, self.failures)

    def figures(self) -> dict[str, float]:
        """Return what the tables show; NaN for a target that was not reached."""
        reached = steps_to_target(self.steps, smoothed(self.sampled), TARGET)
        return {
            "steps": self.steps[-1],
            "start": self.sampled[0],
            "end": float(np.mean(self.sampled[-ENDS:])),
            "area": area(self.steps, self.sampled),
            "steps_to_target": reached,
            "seconds_to_target": (
                float(np.interp(reached, self.steps, self.seconds)) if isfinite(reached) else nan
            ),
            "wall_s": self.wall_s,
            "trained_share": _share(self.trained_trajectories, self.sampled_trajectories),
            "failed_share": _share(self.failed_episodes, self.episodes),
        }


def area(steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the mean height of a curve of straight lines: its area over its width."""
    if len(steps) < 2:
        return values[0]
    return float(np.trapezoid(values, steps)) / (steps[-1] - steps[0])


def _share(part: int, whole: int) -> float:
    return part / whole if whole else nan


def outcome_of(cell: Cell, records: Iterable[Record], *, settings: str, wall_s: float) -> Outcome:
    """Read the outcome of a cell from the records of its run. Raises `SluiceError` if there are none.

    The version with which reinforcement learning begins is step 0; those of the warm-up are left out."""
    rows = list(records)
    trained = {integer(row, "step"): row for row in rows if row.get("train/stage") == "rl"}
    counters = {str(row["source"]): row for row in rows if is_counters(row)}  # the last of each actor
    if not trained or not counters:
        raise SluiceError(
            f"{cell.name}: its record has {len(trained)} steps and counters of {len(counters)} actors, and "
            "each is needed"
        )
    first = min(trained)
    begins = integer(trained[first], "train/policy_version") - first
    evaluations = (row for row in rows if row.get("kind") == "evaluation")
    curve = {integer(row, "policy_version") - begins: row for row in evaluations}
    curve = {step: curve[step] for step in sorted(curve) if step >= 0}
    if 0 not in curve:
        raise SluiceError(f"{cell.name}: its record has no evaluation of step 0, where training begins")
    evaluated, began = list(curve.values()), min(number(row, "time_s") for row in rows)

    def total(rows: Iterable[Record], key: str) -> int:
        return sum(integer(row, key) for row in rows)

    return Outcome(
        preset=cell.preset, failures=cell.failures, seed=cell.seed, settings=settings,
        wall_s=round(wall_s, 1),
        steps=tuple(curve),
        sampled=tuple(round(number(row, "sampled"), DIGITS) for row in evaluated),
        greedy=tuple(round(number(row, "greedy"), DIGITS) for row in evaluated),
        seconds=tuple(round(number(row, "time_s") - began, 1) for row in evaluated),
        sampled_trajectories=total(counters.values(), "sampled/trajectories"),
        trained_trajectories=total(trained.values(), "train/trajectories"),
        episodes=total(counters.values(), "rollout/episodes"),
        failed_episodes=sum(total(counters.values(), f"rollout/{name}") for name in FAILED_EPISODES.values()),
    )  # fmt: skip
