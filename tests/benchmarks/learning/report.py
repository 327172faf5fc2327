"""What the cells say together: the table by preset, and whether failures have changed how it learns."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan

from benchmarks.learning.cells import PRESETS
from benchmarks.learning.outcome import TARGET, Outcome
from benchmarks.whole_runs.spread import Spread
from bus.codec import Json

BIAS_P = 0.01
"""Value of p above which failures are held to have changed nothing."""
Arm = tuple[str, float]
"""Preset, fraction of failures."""
COLUMNS = {
    "steps": ".0f", "start": ".2f", "end": ".2f", "area": ".3f", "steps_to_target": ".0f",
    "seconds_to_target": ".0f", "wall_s": ".0f", "trained_share": ".2f", "failed_share": ".3f",
}  # fmt: skip
"""Figures of the report, and how the table writes those that are not shares."""


def arms(outcomes: Iterable[Outcome]) -> dict[Arm, list[Outcome]]:
    """Return the outcomes of each preset and fraction, in the order of the tables."""
    found: dict[Arm, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda o: (PRESETS.index(o.preset), o.failures, o.seed)):
        found.setdefault((outcome.preset, outcome.failures), []).append(outcome)
    return found


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Return every figure of an arm over its seeds."""
    figures = [outcome.figures() for outcome in outcomes]
    return {name: Spread.of(one[name] for one in figures) for name in COLUMNS}


def welch_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the two-sided p of Welch's test that two means are equal; NaN with fewer than two values each.

    Equal values without any spread give 1, and unequal ones 0."""
    if min(len(one), len(other)) < 2:
        return nan
    if len(set(one)) == len(set(other)) == 1:
        return float(one[0] == other[0])
    from scipy.stats import ttest_ind  # takes a quarter of a second to import, and only this needs it

    return float(ttest_ind(one, other, equal_var=False).pvalue)


def comparisons(found: Mapping[Arm, Sequence[Outcome]]) -> dict[Arm, float]:
    """Return p of each arm with failures against that without any, by the areas under the held-out curves."""
    areas = {arm: [o.figures()["area"] for o in outcomes] for arm, outcomes in found.items()}
    return {
        (preset, failures): welch_p(areas[preset, 0.0], values)
        for (preset, failures), values in areas.items()
        if failures and (preset, 0.0) in areas
    }


def report(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Return all figures over seeds, and p of each arm with failures."""
    found = arms(outcomes)
    against = comparisons(found)
    return {
        "cells": len(outcomes),
        "target": TARGET,
        "figures": [
            {
                "preset": preset,
                "failures": failures,
                **{name: spread.to_json() for name, spread in spreads(arm).items()},
                **_compared(against.get((preset, failures), nan)),
            }
            for (preset, failures), arm in found.items()
        ],
    }


def _compared(p: float) -> dict[str, Json]:
    """Return p and what it says; None for what is unknown, since JSON has no NaN."""
    return {"p": None, "no_bias": None} if isnan(p) else {"p": p, "no_bias": p > BIAS_P}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of `launch bench learning` in Markdown."""
    found = arms(outcomes)
    against = comparisons(found)
    shown = [name for name in COLUMNS if not name.endswith("_share")]
    titles = [name.replace("_", " ").removesuffix(" s") for name in shown]
    head = ["preset", "injected", "seeds", *titles, "p"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (preset, failures), arm in found.items():
        figures, p = spreads(arm), against.get((preset, failures), nan)
        cells = [preset, f"{failures:.0%}", str(len(arm))]
        cells += [figures[name].text(COLUMNS[name]) for name in shown]
        lines.append(f"| {' | '.join([*cells, '' if isnan(p) else f'{p:.2f}'])} |")
    return "\n".join(lines) + "\n"
