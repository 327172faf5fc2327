"""Tells which groups made which policy version, and what came of it: one line a step, for audits and
replays."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bus.errors import LostDataError, StorageError
from storage.disk.atomic_files import append_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One optimizer step. What older builds did not write is None."""

    step: int
    policy_version: int
    """The version that the step made."""
    incarnation: str
    """The learner process that trained it."""
    leases: tuple[int, ...]
    """Groups of the step, in the order of the batch."""
    weights: tuple[float, ...] | None = None
    """Importance weight of each group."""
    batch_xxh3: str | None = None
    """`StepBatch.xxh3` of what the trainer got."""
    loss: float | None = None
    """Mean over the trained tokens."""
    grad_norm: float | None = None
    """Norm of the gradient before clipping."""
    entropy: float | None = None
    """Nats, mean over the trained tokens."""
    lr: float | None = None
    skipped: bool | None = None
    """Says whether at least one update left the weights as they were, since loss or gradient were
    not finite or there was nothing to train."""

    @classmethod
    def parse(cls, line: bytes) -> "TrainedStep | None":
        """Return the step of a line; None for one that a kill cut short. Raises `LostDataError`."""
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            return None
        try:
            weights = entry.get("weights")
            entry |= {
                "leases": tuple(entry["leases"]),
                "weights": None if weights is None else tuple(weights),
            }
            return cls(**{field.name: entry[field.name] for field in fields(cls) if field.name in entry})
        except (AttributeError, KeyError, TypeError) as error:
            raise LostDataError(f"{line[:60]!r} is no step ({error!r})") from error


def record(path: Path, step: TrainedStep) -> None:
    """Add the line of a step. A step trained again has a later line."""
    append_lines(path, [asdict(step)])


def sync(path: Path) -> None:
    """Wait until the disk holds every line.

    Call it before a checkpoint with these steps is written: a resume refuses a
    checkpoint of steps that the lineage lacks."""
    if path.exists():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def read(path: Path, *, until_step: int) -> dict[int, list[int]]:
    """Return leases by step as they count in weights of `until_step`: a step trained again counts once."""
    return {step: list(found.leases) for step, found in steps(path).items() if step <= until_step}


def resumes(path: Path) -> int:
    """Return how often another learner process went on with training; one that came to no step does not
    count."""
    return max(0, len({line.incarnation for line in _lines(path)}) - 1)


def steps(path: Path) -> dict[int, TrainedStep]:
    """Return the steps that made the newest weights, ascending.

    A line takes back the earlier ones of its step and of those after: a learner resumed before it. A learner
    that another has replaced may still write the step it was in the middle of; that does not count."""
    found: dict[int, TrainedStep] = {}
    replaced: set[str] = set()
    newest = ""
    for line in _lines(path):
        if line.incarnation in replaced:
            continue
        if line.incarnation != newest:
            replaced.add(newest)
            newest = line.incarnation
        while found and next(reversed(found)) >= line.step:
            found.popitem()
        found[line.step] = line
    return found


def refuse_other_groups(path: Path, groups: Mapping[int, list[int]]) -> None:
    """Raise `StorageError` when the lineage says that a step trained on other groups than `groups` says.
    Steps that are missing there are passed over: the file may have stayed on another host."""
    written = steps(path)
    for step, leases in groups.items():
        if step in written and list(written[step].leases) != leases:
            said = list(written[step].leases)
            raise StorageError(
                f"the checkpoint trained step {step} on groups {leases}, but {path} says {said}: they are of "
                "different histories; restore the one that is wrong"
            )


def _lines(path: Path) -> Iterator[TrainedStep]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                step = TrainedStep.parse(line)
            except LostDataError as error:
                raise LostDataError(
                    f"{path}, line {number}: {error}. Restore the file, or move it away: the run goes on "
                    "without it, but steps that it lacks cannot be trained again"
                ) from error
            if step is not None:
                yield step
