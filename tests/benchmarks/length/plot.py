"""Draws the share of completed answers over the steps, a panel for each rule and age."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.length.cells import METHODS
from benchmarks.length.outcome import RUNAWAY, Outcome
from benchmarks.length.report import arms
from benchmarks.off_policy.plot import STYLES
from benchmarks.whole_runs.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_completed(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the mean over seeds, and their range."""
    rules = list(dict.fromkeys(rule for rule, _, _ in arms(outcomes)))
    lags = sorted({outcome.lag for outcome in outcomes})
    figure = new_figure(5.0 * len(lags) + 2.0, 3.4 * len(rules))
    panels = figure.subplots(len(rules), len(lags), sharex=True, sharey=True, squeeze=False)
    for row, rule in zip(panels, rules, strict=True):
        for axes, lag in zip(row, lags, strict=True):
            _draw(axes, [o for o in outcomes if (o.cut_off, o.lag) == (rule, lag)])
            axes.set_title(f"cut off: {rule.replace('_', ' ')}; {lag} versions old", loc="left", fontsize=11)
    panels[0][0].set_ylim(0, 1.02)
    figure.supxlabel("optimizer step")
    figure.supylabel("share of completed answers")
    labelled = (axes.get_legend_handles_labels() for axes in panels.flat)
    handles = {label: handle for pair in labelled for handle, label in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    save_figure(figure, path)


def _draw(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for method in METHODS:
        same = [outcome.completed for outcome in outcomes if outcome.method == method]
        if not same:
            continue
        length = min(map(len, same))
        curves = np.array([curve[:length] for curve in same])
        colour, marker = STYLES[method]
        at = np.arange(1, length + 1)
        axes.plot(at, curves.mean(0), color=colour, marker=marker, ms=4, markevery=8, label=method)
        axes.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.12, lw=0)
    axes.axhline(RUNAWAY, color="#777777", ls="--", lw=1)
    axes.grid(alpha=0.25)
