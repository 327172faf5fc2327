"""Learning curves of a run as one picture, drawn from metrics.jsonl."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launch.run_view.history import History, Step, supervised_steps
from storage.disk.atomic_files import write_file
from storage.metrics.records import Record, number, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PX, HEIGHT_PX, DPI = 1200, 1050, 100
MOST_BARS = 120
BLUE, ORANGE, GREEN, GREY, RED = "#0072B2", "#D55E00", "#009E73", "#777777", "#CC3311"
STEP_PARTS = (
    ("training", BLUE, "training_s"),
    ("waiting for the batch", ORANGE, "waiting_s"),
    ("publishing weights", GREEN, "publish_stall_s"),
)
LOSSES = {"train/loss": ("of the step", BLUE), "heldout/loss_nats": ("held out", ORANGE)}
PREFERENCES = {
    "rewards/accuracies": ("accuracy", BLUE),
    "heldout/rewards/accuracies": ("accuracy, held out", ORANGE),
    "rewards/margins": ("margin of the rewards", GREEN),
}
TOKENS = {"train/response_tokens": ("trained", BLUE)}


def draw_curves(
    metrics_path: Path,
    png_path: Path,
    *,
    title: str = "",
    max_staleness: int | None = None,
    target_accuracy: float | None = None,
) -> None:
    """Draw rewards, staleness and step times over optimizer steps, or the losses of a run that has only
    demonstrations so far; works during a run and after it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import: only who draws pays
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    history = History(read_records(metrics_path))
    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    first, second, last = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 3))
    figure.suptitle(f"{title}: learning curves" if title else "Learning curves", fontsize=15)
    supervised = supervised_steps(metrics_path) if not (history.steps or history.evaluations) else {}
    if supervised:
        _draw_figures(first, supervised, LOSSES, "Loss on demonstrations", "mean loss")
        _draw_figures(
            second, supervised, PREFERENCES, "Preferences, of pairs of answers", "mean of the pairs"
        )
        _draw_figures(last, supervised, TOKENS, "Trained tokens", "tokens of a step")
    else:
        _draw_reward(first, history, target_accuracy)
        _draw_staleness(second, history, max_staleness)
        _draw_step_time(last, history)
    last.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    last.set_xlabel("step on demonstrations" if supervised else "optimizer step of reinforcement learning")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_file(png_path, picture.getvalue())


def _draw_figures(
    axes: Axes, rows: Mapping[int, Record], drawn: Mapping[str, tuple[str, str]], title: str, ylabel: str
) -> None:
    for name, (label, color) in drawn.items():
        there = {step: number(row, name) for step, row in sorted(rows.items()) if name in row}
        if there:
            axes.plot(list(there), list(there.values()), ".-", ms=4, color=color, lw=1.5, label=label)
    _finish(axes, title, ylabel)


def _draw_reward(axes: Axes, history: History, target: float | None) -> None:
    steps = list(history.steps.values())
    rewards = np.array([step.reward_mean for step in steps])
    numbers = [step.step for step in steps]
    if steps:
        axes.plot(numbers, rewards, color=BLUE, alpha=0.35, lw=1, label="training reward, mean of the step")
        axes.plot(
            numbers,
            _running_mean(rewards),
            ".-",
            color=BLUE,
            lw=2,
            ms=3,
            label="... mean of the last 10 steps",
        )
    for name in sorted({name for step in steps for name in step.source_rewards}):
        of_source = np.array([step.source_rewards.get(name, np.nan) for step in steps])
        axes.plot(
            numbers, _running_mean(of_source), lw=1, alpha=0.8, label=f"{name}, training, last 10 steps"
        )
    _draw_evaluations(axes, history)
    if target is not None:
        axes.axhline(target, color=GREEN, ls="--", lw=1.5, label=f"target {target:g}")
    _finish(axes, "Reward, in training and held out", "mean reward")


def _draw_evaluations(axes: Axes, history: History) -> None:
    """Evaluations at the middle of the steps that made the versions which drew the answers. What precedes
    reinforcement learning is a level."""
    start = history.trains_from or 0
    later = [e for version, e in history.evaluations.items() if version >= start]
    if later:
        at = [sum(e.drawn_by) / 2 - start for e in later]
        sampled, greedy = [e.sampled for e in later], [e.greedy for e in later]
        axes.plot(at, sampled, "o-", color=ORANGE, lw=2, ms=6, label="held-out reward, sampled")
        axes.plot(at, greedy, "s:", color=ORANGE, lw=1.2, ms=4, alpha=0.7, label="held-out reward, greedy")
    for name, evaluations in history.sets.items():
        drawn = [e for version, e in evaluations.items() if version >= start]
        at = [sum(e.drawn_by) / 2 - start for e in drawn]
        axes.plot(at, [e.sampled for e in drawn], "^-", lw=1.2, ms=4, alpha=0.8, label=f"{name}, sampled")
    for version, evaluation in history.evaluations.items():
        if version < start:
            label = f"held-out before warm-up: {evaluation.sampled:.3f} at {evaluation.where}"
            axes.axhline(evaluation.sampled, color=GREY, ls=":", lw=1.5, label=label)


def _draw_staleness(axes: Axes, history: History, bound: int | None) -> None:
    steps = list(history.steps.values())
    numbers = [step.step for step in steps]
    if steps:
        most = [step.staleness_max for step in steps]
        axes.step(
            numbers,
            most,
            ".-",
            ms=3,
            where="mid",
            color=ORANGE,
            lw=1.2,
            label="oldest trajectory of the step",
        )
        mean = [step.staleness_mean for step in steps]
        axes.plot(numbers, mean, ".-", ms=3, color=BLUE, lw=1.8, label="mean of the step")
    if bound is not None:
        axes.axhline(bound, color=RED, ls="--", lw=1.5, label=f"bound {bound}")
    axes.set_ylim(bottom=-0.1)
    _finish(axes, "Staleness: how far the policy behind the tokens lags", "policy versions")


def _draw_step_time(axes: Axes, history: History) -> None:
    steps = list(history.steps.values())
    numbers = [step.step for step in steps]
    width = max(1, -(-(max(numbers, default=0) - min(numbers, default=0) + 1) // MOST_BARS))
    bins = _binned(steps, width)
    centres = [number + (width - 1) / 2 for number in bins]
    below = np.zeros(len(bins))
    for label, color, part in STEP_PARTS if bins else ():
        height = np.array([np.mean([getattr(step, part) for step in bin_]) for bin_ in bins.values()])
        axes.bar(centres, height, width=0.9 * width, bottom=below, color=color, label=label)
        below += np.nan_to_num(height)
    mean_of = f", mean of {width} steps" if width > 1 else ""
    _finish(axes, f"Where a step's time goes{mean_of}", "seconds per step")


def _binned(steps: list[Step], width: int) -> dict[int, list[Step]]:
    """Consecutive steps together, `width` step numbers a bin, by the first number."""
    bins: dict[int, list[Step]] = {}
    for step in steps:
        bins.setdefault(step.step - (step.step - steps[0].step) % width, []).append(step)
    return bins


def _running_mean(values: NDArray[np.float64], window: int = 10) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        part = part[np.isfinite(part)]
        means.append(float(part.mean()) if len(part) else np.nan)
    return means


def _finish(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color=GREY)
