"""Pictures of the outcomes: what staleness costs each method, and the curves behind it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.off_policy.cells import METHODS
from benchmarks.off_policy.outcome import AT_STEP, TARGET, Outcome
from benchmarks.off_policy.report import over_seeds
from benchmarks.whole_runs.curves import smoothed
from benchmarks.whole_runs.pictures import new_figure, save_figure
from benchmarks.whole_runs.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    "#000000", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#999933", "#882255",
    "#777777",
)  # fmt: skip
"""Colours that the colour-blind tell apart (Okabe and Ito, Tol); markers tell methods apart too."""
MARKERS = ("X", "o", "s", "D", "^", "v", "P", "<", ">", "*")
STYLES = {name: (COLOURS[n], MARKERS[n]) for n, name in enumerate(METHODS)}


def draw_staleness(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw steps to the target and the accuracy at step 100 over the lag, with the range over seeds."""
    figure = new_figure(13, 5)
    steps, accuracy = figure.subplots(1, 2)
    longest = max(max(outcome.evaluated_steps) for outcome in outcomes)
    for method in METHODS:
        _draw_method(steps, outcomes, method, "steps_to_target", never=longest * 1.05)
        _draw_method(accuracy, outcomes, method, "accuracy_at_100", never=0.0)
    steps.axhline(longest * 1.05, color="#777777", ls=":", lw=1)
    steps.annotate("never", (0, longest * 1.05), textcoords="offset points", xytext=(4, 3), color="#777777")
    _finish(steps, f"Steps to a held-out accuracy of {TARGET}", "steps")
    _finish(accuracy, f"Held-out accuracy at step {AT_STEP}", "accuracy")
    accuracy.axhline(TARGET, color="#777777", ls="--", lw=1)
    accuracy.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_figure(figure, path)


def draw_curves(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the held-out accuracy over steps, a panel for each lag, as the mean over seeds and their range."""
    lags = sorted({outcome.lag for outcome in outcomes})
    figure = new_figure(13, 3.2 * -(-len(lags) // 3))
    panels = list(figure.subplots(-(-len(lags) // 3), 3, sharex=True, sharey=True, squeeze=False).flat)
    for axes, lag in zip(panels, lags, strict=False):
        _draw_lag(axes, [outcome for outcome in outcomes if outcome.lag == lag])
        axes.set_title(f"{lag} versions old", loc="left", fontsize=11)
        axes.grid(alpha=0.25)
    for axes in panels[len(lags) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer step")
    figure.supylabel("held-out accuracy, sampled")
    labelled = (axes.get_legend_handles_labels() for axes in panels)
    handles = {label: handle for pair in labelled for handle, label in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    save_figure(figure, path)


def _draw_lag(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Draw the mean curve of each method over its seeds, and their range."""
    for method in METHODS:
        same = [outcome for outcome in outcomes if outcome.method == method]
        if not same:
            continue
        length = min(len(outcome.sampled) for outcome in same)
        curves = np.array([smoothed(outcome.sampled)[:length] for outcome in same])
        colour, marker = STYLES[method]
        at = same[0].evaluated_steps[:length]
        axes.plot(at, curves.mean(0), color=colour, marker=marker, ms=4, markevery=4, label=method)
        axes.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.12, lw=0)


def _draw_method(axes: Axes, outcomes: Sequence[Outcome], method: str, name: str, *, never: float) -> None:
    found = {key[1]: figures[name] for key, figures in over_seeds(outcomes).items() if key[0] == method}
    if not found:
        return
    lags = sorted(found)
    colour, marker = STYLES[method]

    def heights(of: Sequence[Spread], part: str) -> list[float]:
        return [value if isfinite(value := getattr(spread, part)) else never for spread in of]

    spreads = [found[lag] for lag in lags]
    middle, low, high = (np.array(heights(spreads, part)) for part in ("middle", "lowest", "highest"))
    axes.errorbar(
        lags, middle, yerr=[middle - low, high - middle], color=colour, marker=marker,
        ms=6, lw=1.5, capsize=2, elinewidth=1, label=method,
    )  # fmt: skip


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks([0, 1, 2, 4, 8, 16, 32], labels=["0", "1", "2", "4", "8", "16", "32"])
    axes.set_xlabel("staleness in versions")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
