"""What a run of one cell was like: how long its answers were, how many ended, and how many were right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.length.cells import Cell, CutOff
from benchmarks.whole_runs.results import OutcomeLine
from bus.errors import SluiceError
from storage.metrics.records import Record, integer, number

RUNAWAY = 0.5
"""Share of completed answers below which a step counts as run away."""
LATE, ENDS = 10, 3
"""Steps, and evaluations, at the end whose means are the end of a curve."""
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Outcome(OutcomeLine):
    """The curves of one cell."""

    method: str
    lag: int
    cut_off: CutOff
    seed: int
    settings: str
    """Digest of all settings but those of the cell."""
    wall_s: float
    completed: tuple[float, ...]
    """Share of the answers of each step that ended by themselves."""
    lengths: tuple[float, ...]
    """Mean tokens of the answers of each step."""
    rewards: tuple[float, ...]
    """Mean reward of the answers of each step, where one that was cut off has 0."""
    staleness: tuple[float, ...]
    """Mean staleness of each step, in versions."""
    ess: tuple[float, ...]
    """Effective sample size of each step, as a fraction."""
    evaluated_steps: tuple[int, ...]
    """Steps whose weights answered the held-out prompts."""
    right: tuple[float, ...]
    """Share of the held-out answers of each of them that were right, so completed too."""

    @property
    def cell(self) -> Cell:
        """Return which cell it is of."""
        return Cell(self.seed, self.cut_off, self.lag, self.method)

    def figures(self) -> dict[str, float]:
        """Return what the tables show."""
        completed, ess = np.array(self.completed), np.array(self.ess)
        steady = slice(min(self.lag, len(self.staleness) - 1), None)
        return {
            "runaway_share": float((completed < RUNAWAY).mean()),
            "completed_least": float(completed.min()),
            "completed_end": float(completed[-LATE:].mean()),
            "length_most": max(self.lengths),
            "length_end": float(np.mean(self.lengths[-LATE:])),
            "right_end": float(np.mean(self.right[-ENDS:])),
            "ess_mean": float(ess[steady].mean()),
            "staleness_mean": float(np.mean(self.staleness[steady])),
        }


def outcome_of(cell: Cell, records: Iterable[Record], *, settings: str, wall_s: float) -> Outcome:
    """Read the curves of a cell from the records of its run. Raises `SluiceError` if there are none."""
    rows = list(records)
    steps = {integer(row, "step"): row for row in rows if row.get("train/stage") == "rl"}
    evaluations = {integer(row, "step"): row for row in rows if row.get("kind") == "evaluation"}
    if not steps or not evaluations:
        raise SluiceError(
            f"{cell.name}: its record has {len(steps)} steps and {len(evaluations)} evaluations, and each is "
            "needed"
        )
    trained = [steps[step] for step in sorted(steps)]

    def column(rows: Sequence[Record], key: str) -> tuple[float, ...]:
        return tuple(round(number(row, key), DIGITS) for row in rows)

    return Outcome(
        method=cell.method, lag=cell.lag, cut_off=cell.cut_off, seed=cell.seed,
        settings=settings, wall_s=round(wall_s, 1),
        completed=column(trained, "rollout/completed_fraction"),
        lengths=column(trained, "train/response_tokens_mean"),
        rewards=column(trained, "reward/mean"),
        staleness=column(trained, "staleness/mean_versions"),
        ess=column(trained, "policy/ess_fraction"),
        evaluated_steps=tuple(sorted(evaluations)),
        right=column([evaluations[step] for step in sorted(evaluations)], "sampled"),
    )  # fmt: skip
