"""Draws the held-out curves, a panel for each preset."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.learning.outcome import TARGET, Outcome
from benchmarks.learning.report import arms
from benchmarks.whole_runs.curves import smoothed
from benchmarks.whole_runs.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Colours by fraction of failures, which the colour-blind tell apart (Okabe and Ito)."""

MOST_COLUMNS = 4
"""Panels beside each other."""


def draw_curves(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw each seed's held-out reward over the steps, coloured by the fraction of failures."""
    presets = list(dict.fromkeys(preset for preset, _ in arms(outcomes)))
    fractions = sorted({outcome.failures for outcome in outcomes})
    colours = {fraction: COLOURS[n % len(COLOURS)] for n, fraction in enumerate(fractions)}
    columns = min(len(presets), MOST_COLUMNS)
    rows = ceil(len(presets) / columns)
    figure = new_figure(3.6 * columns + 1.5, 3.2 * rows + 0.4)
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes in panels[len(presets) :]:
        axes.set_visible(False)
    for axes, preset in zip(panels, presets, strict=False):
        _draw_preset(axes, [outcome for outcome in outcomes if outcome.preset == preset], colours)
        axes.set_title(preset, loc="left", fontsize=11)
    panels[0].set_ylim(0, 1)
    figure.supxlabel("optimizer step")
    figure.supylabel("held-out reward, sampled")
    labelled = (axes.get_legend_handles_labels() for axes in panels)
    handles = {label: handle for pair in labelled for handle, label in zip(*pair, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    save_figure(figure, path)


def _draw_preset(axes: Axes, outcomes: Sequence[Outcome], colours: dict[float, str]) -> None:
    for outcome in outcomes:
        label = f"{outcome.failures:.0%} fail"
        axes.plot(outcome.steps, smoothed(outcome.sampled), color=colours[outcome.failures], label=label)
    axes.axhline(TARGET, color="#777777", ls="--", lw=1)
    axes.grid(alpha=0.25)
