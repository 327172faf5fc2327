"""Cells of the benchmark of learning: a preset, with or without injected failures, and a seed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.whole_runs.cells import parts
from bus.errors import ConfigError

STEPS = {
    "guess": 80,
    "nim": 60,
    "duel": 60,
    "panel": 60,
    "product": 60,
    "agent": 40,
    "python": 60,
    "retool": 60,
    "debate": 60,
    "search": 60,
    "mcp": 60,
}
"""Presets of several turns or agents in the order of the tables, with the optimizer steps of a run."""
PRESETS = tuple(STEPS)
SEEDS = (0, 1, 2)
FAILURES = (0.0, 0.1)
"""Fractions of the rollouts that are made to fail."""


@dataclass(frozen=True, order=True)
class Cell:
    """One run of the benchmark."""

    seed: int
    preset: str
    failures: float
    """Fraction of the rollouts that fail, of training and of evaluations."""

    @property
    def name(self) -> str:
        """Return a name that is also that of the run."""
        return f"{self.preset}-failures{1000 * self.failures:03.0f}-seed{self.seed}"


def grid(presets: Iterable[str], failures: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    """Return the cells in the order in which they are run: all of a seed before the next seed."""
    return [Cell(*one) for one in product(seeds, presets, failures)]


def chosen_fractions(flag: str, text: str, default: Sequence[float]) -> tuple[float, ...]:
    """Return the fractions of a list with commas, ascending; the default for an empty one.

    Raises `ConfigError` for what is no number of thousandths from 0 to below 1."""
    try:
        found = {float(part) for part in parts(text)}
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: give fractions with commas, such as 0,0.1") from error
    if any(not 0 <= value < 1 or value != round(value, 3) for value in found):
        raise ConfigError(f"{flag} {text}: give fractions from 0 to below 1, of three decimals at most")
    return tuple(sorted(found)) or tuple(default)
