"""Cells of the benchmark of length: what each trains with, and what becomes of answers that are cut off."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from benchmarks.off_policy.cells import METHODS as ALL_METHODS
from launch.settings.run_config import Layer

METHODS = {
    name: ALL_METHODS[name]
    for name in ("none", "token_tis", "sequence_tis", "decoupled", "cispo", "ppo_clip", "dppo_tv")
}
"""Settings below `learner` of each method, in the order of the tables."""
HELD = ("ppo_clip", "dppo_tv")
"""Methods whose tokens have no gradient once they are too far from the policy that sampled them."""
CutOff = Literal["wrong", "left_out"]
CUT_OFF: dict[CutOff, Layer] = {
    "wrong": {"advantage": {"type": "grpo"}},
    "left_out": {
        "advantage": {
            "type": "plugin",
            "function": "benchmarks.length.completed:completed_only",
            "settings": {"std_floor": 1e-4},
        }
    },
}
"""Settings below `learner` by what becomes of answers that are cut off: they count as any answer with a
reward of 0, or they are in no baseline and move nothing."""
LAGS = (0, 8)
SEEDS = (0, 1, 2)


@dataclass(frozen=True, order=True)
class Cell:
    """One run of the benchmark."""

    seed: int
    cut_off: CutOff
    lag: int
    """Versions that every token is old."""
    method: str

    @property
    def name(self) -> str:
        """Return a name that is also that of the run."""
        return f"{self.method}-lag{self.lag}-{self.cut_off.replace('_', '-')}-seed{self.seed}"


def grid(
    methods: Iterable[str], lags: Iterable[int], cut_off: Iterable[CutOff], seeds: Iterable[int]
) -> list[Cell]:
    """Return the cells in the order in which they are run: all of a seed before the next seed."""
    return [Cell(*one) for one in product(seeds, cut_off, lags, methods)]
