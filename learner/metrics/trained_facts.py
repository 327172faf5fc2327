"""Advantage and importance ratios of every trajectory that a step trained on: 36 bytes each, for people.

It loads without torch, since the dashboard and `launch tail` read them."""

import re
from collections.abc import Collection, Mapping
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bus.messages import parse_trajectory_name
from learner.data.outcomes import ImportanceRatios
from storage.disk.atomic_files import make_directory
from storage.disk.file_errors import naming

_DIRECTORY = "trained"
STEPS_A_FILE = 100
FILES_KEPT = 1000
"""Files that are kept, the newest ones."""
_NAME = re.compile(r"steps-([0-9]{8,})\.records")
_RECORD = np.dtype([
    ("lease", "<i8"), ("step", "<i4"), ("sample", "<i4"), ("advantage", "<f4"),
    *((name, "<f4") for name in ImportanceRatios._fields),
])  # fmt: skip
_UNKNOWN = ImportanceRatios(nan, nan, nan, nan)


class TrainedFacts(NamedTuple):
    """What a step made of one trajectory."""

    advantage: float
    """Mean over the trained tokens."""
    ratios: ImportanceRatios | None
    """None where they are not known: in a step that trained the critic alone, and of a trajectory that its
    update has left out."""


def write(run: Path, step: int, facts: Mapping[str, TrainedFacts]) -> None:
    """Record the facts of a step by trajectory, in the directory of a run; the oldest files beyond
    `FILES_KEPT` are removed.

    A step that is trained again has later records, which count. What a kill cut short is removed."""
    directory = run / _DIRECTORY
    make_directory(directory)
    records = np.array(
        [(*_place(step, name), one.advantage, *(one.ratios or _UNKNOWN)) for name, one in facts.items()],
        dtype=_RECORD,
    )
    path = _path(run, step)
    is_new = not path.exists()
    with naming(path), path.open("ab") as file:
        file.truncate(file.tell() - file.tell() % _RECORD.itemsize)
        file.write(records.tobytes())
    if is_new:
        files = [found for found in directory.iterdir() if _NAME.fullmatch(found.name)]
        for old in sorted(files)[:-FILES_KEPT]:
            old.unlink(missing_ok=True)


def read(run: Path, steps: Mapping[int, Collection[int]]) -> dict[int, dict[int, dict[int, TrainedFacts]]]:
    """Return the facts of groups by lease, step and sample, as far as they are recorded here. `steps` are
    those that each lease is wanted of."""
    found: dict[int, dict[int, dict[int, TrainedFacts]]] = {}
    for path in sorted({_path(run, step) for wanted in steps.values() for step in wanted}):
        try:
            records = np.fromfile(path, _RECORD)
        except FileNotFoundError:
            continue
        of_leases = records[np.isin(records["lease"], [*steps])]
        for lease, step, sample, advantage, mean, *others in of_leases.tolist():
            if step in steps[lease]:
                ratios = None if isnan(mean) else ImportanceRatios(mean, *others)
                found.setdefault(lease, {}).setdefault(step, {})[sample] = TrainedFacts(advantage, ratios)
    return found


def _place(step: int, name: str) -> tuple[int, int, int]:
    lease, sample = parse_trajectory_name(name)
    return lease, step, sample


def _path(run: Path, step: int) -> Path:
    return run / _DIRECTORY / f"steps-{step // STEPS_A_FILE * STEPS_A_FILE:08}.records"
