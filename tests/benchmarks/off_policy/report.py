"""What the cells say together: figures over seeds, the tables, and what was to be shown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, isnan, nan

from benchmarks.off_policy.cells import METHODS
from benchmarks.off_policy.outcome import AT_STEP, HELD, TARGET, Outcome
from benchmarks.whole_runs.spread import Spread
from bus.codec import Json

UNCORRECTED_LAG, FAR_LAG = 8, 32
NEAR, BELOW, FAR = 1.3, 0.6, 2.0
"""Token TIS at lag 8 over on-policy; the uncorrected accuracy at step 100; any correction at lag 32."""
SLOPE = 0.25
"""What decoupled PPO loses of its accuracy at lag 8, over what the uncorrected loss loses: a slope beside a
cliff (AReaL, arXiv:2505.24298, table 3)."""
SAVED = 0.4
"""Share of the generated tokens that reuse is to save."""
Key = tuple[str, int, int]
"""Method, lag, reuse."""


def over_seeds(outcomes: Iterable[Outcome]) -> dict[Key, dict[str, Spread]]:
    """Return every figure of every method, lag and reuse over its seeds."""
    found: dict[Key, list[dict[str, float]]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.method, outcome.lag, outcome.reuse), []).append(outcome.figures())
    return {
        key: {name: Spread.of(cell[name] for cell in cells) for name in cells[0]}
        for key, cells in found.items()
    }


def report(outcomes: Sequence[Outcome]) -> dict[str, Json]:
    """Return all figures over seeds, what was to be shown, and whether the staleness was held."""
    spreads = over_seeds(outcomes)
    return {
        "cells": len(outcomes),
        "target": TARGET,
        "figures": [
            {"method": method, "lag": lag, "reuse": reuse, **{name: s.to_json() for name, s in found.items()}}
            for (method, lag, reuse), found in sorted(spreads.items(), key=lambda item: _place(item[0]))
        ],
        "staleness_not_held": [o.cell.name for o in outcomes if o.reuse == 1 and not held(o)],
        "shown": shown(spreads),
    }


def held(outcome: Outcome) -> bool:
    """Return whether the mean staleness in the steady state is the lag, within half a version."""
    return abs(outcome.figures()["staleness_mean"] - outcome.lag) <= HELD


def shown(spreads: Mapping[Key, Mapping[str, Spread]]) -> dict[str, Json]:
    """Return each ratio that was to be shown with its bound; None where cells are missing."""

    def middle(method: str, lag: int, name: str) -> float:
        found = spreads.get((method, lag, 1))
        return nan if found is None else found[name].middle

    on_policy = middle("token_tis", 0, "steps_to_target")
    far = [middle(method, FAR_LAG, "steps_to_target") for method in METHODS if method != "none"]
    best = min((steps for steps in far if not isnan(steps)), default=nan)
    near = middle("token_tis", UNCORRECTED_LAG, "steps_to_target") / on_policy
    uncorrected = middle("none", UNCORRECTED_LAG, f"accuracy_at_{AT_STEP}")

    def lost(method: str) -> float:
        at_0, at_lag = (middle(method, lag, f"accuracy_at_{AT_STEP}") for lag in (0, UNCORRECTED_LAG))
        return at_0 - at_lag

    cliff = lost("none")
    return {
        "token_tis_at_8_over_on_policy": _bounded(near, NEAR),
        "uncorrected_at_8_at_step_100": _bounded(uncorrected, BELOW),
        "best_at_32_over_on_policy": _bounded(best / on_policy, FAR),
        "decoupled_lost_at_8_over_uncorrected": _bounded(lost("decoupled") / cliff if cliff else nan, SLOPE),
    }


def _bounded(value: float, bound: float) -> dict[str, Json]:
    """Return a value with its upper bound; what was never reached is missed."""
    known = None if isnan(value) else value <= bound
    return {"value": value if isfinite(value) else None, "at_most": bound, "holds": known}


def _place(key: Key) -> tuple[int, int, int]:
    return list(METHODS).index(key[0]), key[2], key[1]


# --- tables ---


def staleness_tables(outcomes: Sequence[Outcome]) -> str:
    """Return the table of `launch bench staleness` in Markdown; its picture has the accuracies."""
    spreads = {key: found for key, found in over_seeds(outcomes).items() if key[2] == 1}
    lags = sorted({lag for _, lag, _ in spreads})
    methods = [method for method in METHODS if any(key[0] == method for key in spreads)]

    def cell(method: str, lag: str) -> str:
        found = spreads.get((method, int(lag), 1))
        return found["steps_to_target"].text(".0f") if found else ""

    steps = _table("method", methods, [str(lag) for lag in lags], cell)
    return f"Steps to a held-out accuracy of {TARGET}, by lag:\n\n{steps}\n"


def reuse_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of `launch bench reuse` in Markdown."""
    spreads = over_seeds(outcomes)
    rows = sorted({(method, lag) for method, lag, _ in spreads}, key=lambda row: _place((*row, 1)))
    head = "| method | bound | reuse | tokens to target | saved | steps to target | mean staleness | at end |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for method, lag in rows:
        once = spreads.get((method, lag, 1))
        for reuse in sorted(key[2] for key in spreads if key[:2] == (method, lag)):
            found = spreads[method, lag, reuse]
            tokens = found["tokens_to_target"]
            cells = (
                method, str(lag), str(reuse), tokens.text(",.0f"), _saved(once, tokens),
                found["steps_to_target"].text(".0f"), found["staleness_mean"].text(".1f"),
                found["accuracy_end"].text(".2f"),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def saved_fraction(once: Mapping[str, Spread] | None, tokens: Spread) -> float:
    """Return the share of the generated tokens that reuse saves, by the medians; NaN where it is unknown."""
    if once is None or not (isfinite(once["tokens_to_target"].middle) and isfinite(tokens.middle)):
        return nan
    return 1 - tokens.middle / once["tokens_to_target"].middle


def _saved(once: Mapping[str, Spread] | None, tokens: Spread) -> str:
    fraction = saved_fraction(once, tokens)
    return "" if isnan(fraction) else f"{fraction:.0%}"


def _table(corner: str, rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    lines = [f"| {' | '.join([corner, *columns])} |", "|" + "---|" * (len(columns) + 1)]
    lines += [f"| {' | '.join([row, *(cell(row, column) for column in columns)])} |" for row in rows]
    return "\n".join(lines)
