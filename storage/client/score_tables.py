"""Score tables, which hold other rewards for stored trajectories, and comparisons with the old rewards."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bus.errors import ConfigError, SchemaError
from bus.messages import parse_trajectory_name
from storage.disk.atomic_files import make_directory, write_file
from storage.disk.file_errors import writing

FEW_VALUES = 10
"""Up to this many different rewards a comparison has a row for each; beyond, a row for each quarter."""


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of a trajectory by another function."""

    trajectory_id: str
    old: float
    """Reward that the answer was trained with."""
    reward: float


def scores_path(run: Path, name: str) -> Path:
    """Return the path of the table of that name; raises `ConfigError` for a name that no file may have."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name) or name.startswith("."):
        raise ConfigError(f"{name!r} cannot name a score table: use letters, digits, '_', '-' and '.'")
    return run / "scores" / f"{name}.jsonl"


def save_scores(path: Path, scores: Iterable[Score]) -> None:
    """Replace the table atomically and durably, one line per trajectory. Raises `StorageError`."""
    lines = (json.dumps({"trajectory_id": s.trajectory_id, "old": s.old, "reward": s.reward}) for s in scores)
    with writing(path):
        make_directory(path.parent)
        write_file(path, "".join(f"{line}\n" for line in lines).encode())


def load_scores(path: Path) -> dict[tuple[int, int], float]:
    """Return the rewards by lease and sample. Raises `ConfigError` for a missing table, with the names of
    those there are, and for a malformed line."""
    if not path.is_file():
        there = ", ".join(sorted(p.stem for p in path.parent.glob("*.jsonl"))) or "none"
        raise ConfigError(f"no score table {path}: there are {there}; `launch rescore` makes one")
    scores: dict[tuple[int, int], float] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            scores[parse_trajectory_name(row["trajectory_id"])] = float(row["reward"])
        except (ValueError, KeyError, TypeError, SchemaError) as error:
            raise ConfigError(f"{path}, line {number}: not a score ({error}): make the table anew") from error
    return scores


@dataclass(frozen=True)
class Class:
    """Trajectories whose old rewards have something in common."""

    old: str
    trajectories: int
    mean_new: float


@dataclass(frozen=True)
class Comparison:
    """How new rewards differ from old ones."""

    mean_old: float
    mean_new: float
    changed_fraction: float
    rank_correlation: float | None
    """Spearman's rank correlation; None if the old or the new rewards are all equal."""
    by_old: tuple[Class, ...]


def compare(scores: Sequence[Score]) -> Comparison:
    """Compare old and new rewards of at least one score."""
    old, new = (np.array([getattr(s, name) for s in scores], np.float64) for name in ("old", "reward"))
    return Comparison(
        mean_old=float(old.mean()),
        mean_new=float(new.mean()),
        changed_fraction=float((old != new).mean()),
        rank_correlation=_rank_correlation(old, new),
        by_old=tuple(
            Class(label, int(mask.sum()), float(new[mask].mean()))
            for label, mask in _classes(old).items()
            if mask.any()
        ),
    )


def _rank_correlation(old: NDArray[np.float64], new: NDArray[np.float64]) -> float | None:
    from scipy.stats import spearmanr  # takes a quarter of a second to import, and only this needs it

    return float(spearmanr(old, new).statistic) if np.ptp(old) and np.ptp(new) else None


def _classes(old: NDArray[np.float64]) -> Mapping[str, NDArray[np.bool_]]:
    values = np.unique(old)
    if len(values) <= FEW_VALUES:
        return {f"{value:g}": old == value for value in values}
    edges = np.unique(np.quantile(old, [0, 0.25, 0.5, 0.75, 1]))
    places = np.clip(np.searchsorted(edges, old, side="right") - 1, 0, len(edges) - 2)
    return {f"{a:g} to {b:g}": places == n for n, (a, b) in enumerate(pairwise(edges))}
