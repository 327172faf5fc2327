"""Which of the trajectories that arrive are stored, and why the others are not."""

from collections.abc import Sequence
from dataclasses import dataclass

from bus.errors import SchemaError
from bus.trajectory import Trajectory
from storage.account.records import DropReason
from storage.store.contents import StoreContents
from storage.store.index import LARGEST_GROUP


@dataclass(frozen=True)
class Arrivals:
    """What became of trajectories that arrived together."""

    fresh: list[Trajectory]
    """Those to store, each once."""
    dropped: list[tuple[Trajectory, DropReason]]
    late_siblings: int
    """Number of those that their group was closed without."""


def sort_arrivals(held: StoreContents, trajectories: Sequence[Trajectory]) -> Arrivals:
    """Tell trajectories that are to be stored from others. Raises `SchemaError` if siblings disagree on
    `group_size`."""
    fresh: dict[tuple[int, int], Trajectory] = {}
    dropped: list[tuple[Trajectory, DropReason]] = []
    sizes: dict[int, int] = {}
    late = 0
    for t in trajectories:
        if held.groups.is_forgotten(t.lease_id):  # delivered once more, or rejected: no step will have it
            dropped.append((t, DropReason.SETTLED))
            continue
        stored = held.index.holds(t.lease_id, t.sample)
        if held.groups.is_closed(t.lease_id):
            late += not stored
            dropped.append((t, DropReason.CLOSED))
            continue
        size = held.index.group_size(t.lease_id) or sizes.setdefault(t.lease_id, t.group_size)
        if t.group_size != size:
            raise _misfit(t, f"its group has {size} samples, it says {t.group_size}")
        if size > LARGEST_GROUP:
            raise _misfit(t, f"a group of {size} samples cannot be stored")
        if stored or fresh.setdefault((t.lease_id, t.sample), t) is not t:
            dropped.append((t, DropReason.HELD))
    return Arrivals(list(fresh.values()), dropped, late)


def _misfit(trajectory: Trajectory, why: str) -> SchemaError:
    reason = f"{trajectory.trajectory_id}: {why}"
    return SchemaError(reason, kind="group_size", actor=trajectory.actor)
