"""Cells of the benchmarks of staleness and reuse: what each trains with, and which of them are wanted."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from benchmarks.whole_runs.cells import chosen_names
from launch.settings.run_config import Layer

METHODS: dict[str, Layer] = {
    "none": {"loss": {"type": "reinforce"}, "correction": {"type": "none"}},
    "ppo_clip": {"loss": {"type": "ppo_clip", "centre": "behaviour"}},
    "token_tis": {"loss": {"type": "reinforce"}, "correction": {"type": "token_tis", "truncation_cap": 2.0}},
    "sequence_tis": {"loss": {"type": "reinforce"}, "correction": {"type": "sequence_tis"}},
    "decoupled": {"loss": {"type": "ppo_clip", "centre": "proximal"}},
    "cispo": {"loss": {"type": "cispo"}, "aggregation": {"type": "token_mean"}},
    "dppo_tv": {
        "loss": {"type": "reinforce"},
        "correction": {"type": "token_tis", "truncation_cap": float("inf")},
        "rejection": {"type": "binary_tv"},
    },
    "m2po": {
        "loss": {"type": "reinforce"},
        "correction": {"type": "token_tis", "truncation_cap": float("inf")},
        "rejection": {"type": "second_moment"},
    },
    "vespo": {"loss": {"type": "vespo"}, "aggregation": {"type": "token_mean"}},
    "oapl": {
        "loss": {"type": "regression", "kl_weight": 0.1},
        "advantage": {"type": "oapl", "value_kl_weight": 1.0},
        "aggregation": {"type": "constant", "tokens": 1},
    },
}
"""Settings below `learner` of each method, in the order of the tables.

DPPO-TV and M2PO choose tokens, and weigh those that are left by their whole ratio, as their papers do."""
LAGS = (0, 1, 2, 4, 8, 16, 32)
"""Versions by which the policy that samples lags; they are the edges of the recorded histogram."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True, order=True)
class Cell:
    """One run of a benchmark."""

    seed: int
    reuse: int
    """Steps that train on each group."""
    lag: int
    """Versions that a token may be old: with a `reuse` of 1 those that it is."""
    method: str

    @property
    def name(self) -> str:
        """Return a name that is also that of the run."""
        return f"{self.method}-lag{self.lag}-reuse{self.reuse}-seed{self.seed}"


def grid(
    methods: Iterable[str], lags: Iterable[int], reuses: Iterable[int], seeds: Iterable[int]
) -> list[Cell]:
    """Return the cells in the order in which they are run: all of a seed before the next seed.

    A group cannot be trained on more often than there are versions in which it may be: what asks for that is
    left out."""
    every = product(seeds, reuses, lags, methods)
    return [Cell(seed, reuse, lag, method) for seed, reuse, lag, method in every if reuse <= lag + 1]


def chosen_methods(text: str) -> tuple[str, ...]:
    """Return the methods of a list with commas, in the order of the tables; all for an empty one.

    Raises `ConfigError` for one that there is not."""
    return chosen_names("--methods", text, METHODS)
