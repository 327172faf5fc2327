"""What the cells say together: the table by method and age, and which methods let the length run away."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.length.cells import CUT_OFF, HELD, METHODS
from benchmarks.length.outcome import RUNAWAY, Outcome
from benchmarks.whole_runs.spread import Spread
from bus.codec import Json

RUNS_AWAY = 0.1
"""Share of the steps with runaway length from which a method is said to let the length run away."""
UNHELD = "token_tis"
Arm = tuple[str, int, str]
"""What becomes of answers that are cut off, lag, method."""
COLUMNS = {"runaway_share": ".2f", "right_end": ".2f"}
"""Figures of the table, and how they are written."""
CELL = "the share of steps that ran away; the share of right answers at the end"


def arms(outcomes: Iterable[Outcome]) -> dict[Arm, list[Outcome]]:
    """Return the outcomes of each arm, in the order of the table."""
    found: dict[Arm, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=_place):
        found.setdefault((outcome.cut_off, outcome.lag, outcome.method), []).append(outcome)
    return found


def _place(outcome: Outcome) -> tuple[int, int, int, int]:
    rule, method = list(CUT_OFF).index(outcome.cut_off), list(METHODS).index(outcome.method)
    return rule, outcome.lag, method, outcome.seed


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread]:
    """Return every figure of an arm over its seeds."""
    figures = [outcome.figures() for outcome in outcomes]
    return {name: Spread.of(one[name] for one in figures) for name in figures[0]}


def report(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Return all figures over seeds, and what was to be shown."""
    found = {arm: spreads(of_arm) for arm, of_arm in arms(outcomes).items()}
    return {
        "cells": len(outcomes),
        "runaway_below": RUNAWAY,
        "figures": [
            {"cut_off": rule, "lag": lag, "method": method, **{n: s.to_json() for n, s in figures.items()}}
            for (rule, lag, method), figures in found.items()
        ],
        "shown": shown(found),
    }


def shown(found: Mapping[Arm, Mapping[str, Spread]]) -> dict[str, Json]:
    """Return for each rule and lag above 0 whether token TIS alone runs away, and what holds the length.

    None stands for what is not measured."""
    by_rule = dict.fromkeys((rule, lag) for rule, lag, _ in found if lag > 0)
    return {f"{rule} at {lag}": _shown(found, rule, lag) for rule, lag in by_rule}


def _shown(found: Mapping[Arm, Mapping[str, Spread]], rule: str, lag: int) -> dict[str, Json]:
    def runs_away(method: str) -> bool | None:
        figures = found.get((rule, lag, method))
        return None if figures is None else figures["runaway_share"].middle >= RUNS_AWAY

    held = {method: None if (away := runs_away(method)) is None else not away for method in HELD}
    return {
        f"{UNHELD}_runs_away": runs_away(UNHELD),
        **{f"{name}_holds": value for name, value in held.items()},
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of `launch bench length` in Markdown, with a row for each method."""
    found = arms(outcomes)
    columns = list(dict.fromkeys((rule, lag) for rule, lag, _ in found))
    seeds = sorted(len(of_arm) for of_arm in found.values())
    head = ["method", *(f"{rule.replace('_', ' ')}, lag {lag}" for rule, lag in columns)]
    lines = [
        f"Seeds: {' to '.join(dict.fromkeys(map(str, seeds[:1] + seeds[-1:])))}. Each cell is {CELL}:",
        "",
    ]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for method in dict.fromkeys(method for _, _, method in found):
        cells = [_cell(found.get((*column, method), [])) for column in columns]
        lines.append(f"| {' | '.join([method, *cells])} |")
    return "\n".join(lines) + "\n"


def _cell(of_arm: Sequence[Outcome]) -> str:
    figures = spreads(of_arm) if of_arm else {}
    return "; ".join(figures[name].text(form) for name, form in COLUMNS.items() if figures)
