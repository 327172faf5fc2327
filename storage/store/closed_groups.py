"""Groups that a shard gives out though siblings are missing: durable marks beside its segments.

A mark is on the disk before its group counts as complete, with its place among the complete groups: that
order is how the dispatcher knows what it has heard of, so it must be the same after a restart.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from bus.errors import StorageError
from storage.disk.atomic_files import write_file

MARKS_FILE = ".closed.jsonl"
Marks = dict[int, int]
"""Places among the complete groups, by lease, in the order of closing."""


def load_marks(directory: Path) -> Marks:
    """What `save_marks` wrote; none when nothing was ever closed. Raises `StorageError` when damaged."""
    path = directory / MARKS_FILE
    if not path.exists():
        return {}
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {int(row["lease_id"]): int(row["place"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be used ({error!r}): restore it") from error


def save_marks(directory: Path, marks: Mapping[int, int]) -> None:
    """Replace the marks durably. Raises `StorageError`; then they are as they were."""
    path = directory / MARKS_FILE
    rows = (json.dumps({"lease_id": lease_id, "place": place}) for lease_id, place in marks.items())
    try:
        write_file(path, "".join(row + "\n" for row in rows).encode())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def in_order(complete: Iterable[int], marks: Mapping[int, int]) -> list[int]:
    """Leases in the order in which their groups became complete: those with all siblings and those closed."""
    whole = iter(complete)
    ordered: list[int] = []
    for lease_id, place in marks.items():
        ordered += islice(whole, place - len(ordered))
        ordered.append(lease_id)
    return [*ordered, *whole]
