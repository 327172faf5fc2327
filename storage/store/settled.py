"""Which groups of a shard are settled: no step will be given them, so nothing of them is stored any more.

A shard hears it from the dispatcher, and keeps it on its disk, in a file of the size of what is open. What is
settled leaves the memory: it is looked up in the segments when somebody reads it, and a trajectory of it that
the bus delivers once more is refused by its lease's number alone."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.errors import LostDataError
from storage.disk.atomic_files import read_json, write_json
from storage.disk.file_errors import writing

FILE = ".settled"
_REMEDY = "restore it with the segments beside it"


@dataclass(frozen=True)
class Settled:
    """Leases that are settled, and the store as it was when that was noted."""

    through: int = 0
    """Leases below this one are settled, but for `open`."""
    open: frozenset[int] = frozenset()
    rows: int = 0
    """Trajectories that were stored."""
    forgotten: int = 0
    """Complete groups that are known no more: the first ones in the order of completion."""
    order: tuple[int, ...] = ()
    """The leases of the complete groups after those, in that order."""
    youngest: int = -1
    """The highest lease of a complete group."""

    def covers(self, lease_id: int) -> bool:
        return 0 <= lease_id < self.through and lease_id not in self.open

    def which(self, leases: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the mask of those of these leases that are settled."""
        return (leases < self.through) & ~np.isin(leases, np.array(sorted(self.open), np.int64))


def refuse_older_ledger(
    ledger: str, store: str, noted: Settled, *, issued: int, seen: int, again: Iterable[int]
) -> None:
    """Raise `LostDataError` when a ledger was brought back from before what a shard has `noted` of it.

    It would let leases roll out whose groups the shard stores no more, and wait for them for ever.

    Args:
        ledger: names the ledger for a human, and
        store: the directory of the shard.
        noted: its `through` and `forgotten` are looked at.
        issued: leases that the ledger has issued.
        seen: complete groups of the shard that the ledger knows.
        again: leases that are settled, and roll out by what the ledger says."""
    if noted.through > issued:
        what = f"it has issued {issued} leases, and had issued {noted.through}"
    elif noted.forgotten > seen:
        what = f"it has seen {seen} complete groups of this shard, and had seen {noted.forgotten}"
    elif leases := sorted(again):
        what = f"lease {leases[0]} is rolling out by what it says, and was settled"
    else:
        return
    raise LostDataError(
        f"{ledger} is older than what {store}/{FILE} notes of it: {what}. Restore the newer ledger; if there "
        "is none, move ledger and replay away and start a new run from this one's weights"
    )


def settle_more(before: Settled, through: int, unsettled: Iterable[int]) -> Settled:
    """Return what is settled besides what was `before`.

    That stays, though a learner that resumes from further back may be given such a group once more: it is
    whole and takes no more trajectories, and it is read from the segments."""
    if through < before.through:  # an older answer
        return before
    still_open = frozenset(n for n in unsettled if n < through and not before.covers(n))
    return replace(before, through=through, open=still_open)


def save_settled(directory: Path, settled: Settled) -> None:
    """Replace the file durably. Raises `StorageError` when the disk refuses."""
    path = directory / FILE
    with writing(path):
        write_json(path, asdict(settled) | {"open": sorted(settled.open), "order": list(settled.order)})


def load_settled(directory: Path) -> Settled:
    """Return what is noted in a store's directory. Raises `LostDataError` for a garbled file."""
    path = directory / FILE
    if not path.exists():
        return Settled()
    found: dict[str, Any] = read_json(path, _REMEDY)
    try:
        return Settled(
            through=int(found["through"]),
            open=frozenset(map(int, found["open"])),
            rows=int(found["rows"]),
            forgotten=int(found["forgotten"]),
            order=tuple(map(int, found["order"])),
            youngest=int(found["youngest"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LostDataError(f"{path} cannot be used ({error!r}): {_REMEDY}") from error
