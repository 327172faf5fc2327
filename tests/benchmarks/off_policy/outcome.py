"""What a run of one cell was like: curves read from its records, and figures read from the curves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from benchmarks.off_policy.cells import LAGS, Cell
from benchmarks.whole_runs.curves import smoothed, steps_to_target
from benchmarks.whole_runs.results import OutcomeLine
from bus.errors import SluiceError
from storage.metrics.records import Record, integer, is_counters, number

TARGET = 0.9
"""Held-out accuracy that the steps and tokens are counted up to."""
AT_STEP = 100
"""Step at which the accuracy is stated."""
HELD = 0.5
"""Versions by which the mean staleness of the steady state may differ from the lag."""
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Outcome(OutcomeLine):
    """The curves of one cell."""

    method: str
    lag: int
    reuse: int
    seed: int
    settings: str
    """Digest of all settings but those of the cell, and of the model it began from."""
    wall_s: float
    evaluated_steps: tuple[int, ...]
    """Steps whose weights answered the held-out prompts."""
    sampled: tuple[float, ...]
    """Held-out accuracy of each of them, at the temperature of training."""
    greedy: tuple[float, ...]
    generated_tokens: tuple[float, ...]
    """Tokens sampled for training until the end of each of those steps, by the actors' counters."""
    rewards: tuple[float, ...]
    """Mean reward of what each step trained on."""
    staleness: tuple[float, ...]
    """Mean staleness of each step, in versions."""
    tokens_by_staleness: tuple[float, ...]
    """Share of the tokens by the bins of the recorded histogram, in the steps after the first `lag`: up to 0,
    1, 2, 4 and so on versions, and more than 32."""
    ess: tuple[float, ...]
    """Effective sample size of each step, as a fraction."""
    k3: tuple[float, ...]
    """Estimate of KL(behaviour, policy) of each step, in nats."""

    @property
    def cell(self) -> Cell:
        """Return which cell it is of."""
        return Cell(self.seed, self.reuse, self.lag, self.method)

    @property
    def steady(self) -> slice:
        """Return the steps in which tokens can be `lag` versions old; the steps before began at version 0."""
        return slice(min(self.lag, len(self.staleness) - 1), None)

    def figures(self) -> dict[str, float]:
        """Return what the tables show; NaN for a target or a step that was not reached."""
        smooth = smoothed(self.sampled)
        steady = np.array(self.staleness[self.steady])
        ess = np.array(self.ess[self.steady])
        steps_to = steps_to_target(self.evaluated_steps, smooth, TARGET)
        return {
            "steps_to_target": steps_to,
            "tokens_to_target": _at(steps_to, self.evaluated_steps, self.generated_tokens),
            "accuracy_at_100": _at(AT_STEP, self.evaluated_steps, smooth),
            "accuracy_end": smooth[-1],
            "staleness_mean": float(steady.mean()),
            "tokens_in_bin": self.tokens_by_staleness[LAGS.index(self.lag)] if self.lag in LAGS else nan,
            "ess_mean": float(ess.mean()),
            "ess_lowest": float(ess.min()),
        }


def _at(step: float, steps: Sequence[int], values: Sequence[float]) -> float:
    """Return the value at a step, on straight lines; NaN beyond the last."""
    return float(np.interp(step, steps, values, right=nan)) if isfinite(step) else nan


def outcome_of(cell: Cell, records: Iterable[Record], *, settings: str, wall_s: float) -> Outcome:
    """Read the curves of a cell from the records of its run. Raises `SluiceError` if there are none."""
    rows = list(records)
    steps = {integer(row, "step"): row for row in rows if row.get("train/stage") == "rl"}
    evaluations = {integer(row, "step"): row for row in rows if row.get("kind") == "evaluation"}
    counters = sorted(
        (number(row, "time_s"), number(row, "engine/tokens")) for row in rows if is_counters(row)
    )
    if not steps or not evaluations or not counters:
        raise SluiceError(
            f"{cell.name}: its record has {len(steps)} steps, {len(evaluations)} evaluations and "
            f"{len(counters)} counters, and each is needed"
        )
    trained = [steps[step] for step in sorted(steps)]
    evaluated = [evaluations[step] for step in sorted(evaluations)]
    ended = {step: number(row, "time_s") for step, row in steps.items()} | {0: counters[0][0]}
    times, tokens = zip(*counters, strict=True)

    def column(rows: Sequence[Record], key: str) -> tuple[float, ...]:
        return tuple(round(number(row, key), DIGITS) for row in rows)

    generated = np.interp([ended[step] for step in sorted(evaluations)], times, tokens)

    return Outcome(
        method=cell.method, lag=cell.lag, reuse=cell.reuse, seed=cell.seed,
        settings=settings, wall_s=round(wall_s, 1),
        evaluated_steps=tuple(sorted(evaluations)),
        sampled=column(evaluated, "sampled"), greedy=column(evaluated, "greedy"),
        generated_tokens=tuple(np.round(generated).tolist()),
        rewards=column(trained, "reward/mean"),
        staleness=column(trained, "staleness/mean_versions"),
        tokens_by_staleness=_histogram(trained[cell.lag :] or trained[-1:]),
        ess=column(trained, "policy/ess_fraction"),
        k3=column(trained, "policy/k3_nats"),
    )  # fmt: skip


def _histogram(rows: Sequence[Record]) -> tuple[float, ...]:
    """Return the share of tokens in each bin, over steps that weigh the same."""
    names = [f"policy/stale_tokens_{edge}" for edge in (*LAGS, "more")]
    return tuple(round(float(np.mean([number(row, name) for row in rows])), DIGITS) for name in names)
