"""Reads many groups in few passes over the segments: each time, settled ones are looked up there."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import closing

from bus.topology import by_shard
from bus.trajectory import Trajectory
from storage.store.replay import ReplayStore
from storage.store.segments import Segment


def read_groups(stores: Sequence[ReplayStore], lease_ids: Sequence[int]) -> list[list[Trajectory]]:
    """Return these complete groups in this order, read from the run's shards in one call each.

    All of them are in memory, or mapped, together. Raises `StorageError` as `ReplayStore.read`."""
    groups: defaultdict[int, list[Trajectory]] = defaultdict(list)
    for shard, leases in by_shard(dict.fromkeys(lease_ids), len(stores)).items():
        for trajectory in stores[shard].read(leases):
            groups[trajectory.lease_id].append(trajectory)
    return [groups[lease_id] for lease_id in lease_ids]


def each_trajectory(store: ReplayStore, lease_ids: Container[int]) -> Iterator[Trajectory]:
    """Yield the trajectories of these groups that are here, as they were stored, without late rewards.

    Each segment is opened once, and unmapped before the next one is. Nobody may merge or retire segments
    meanwhile. Raises `StorageError` for one that is torn, and for a trajectory whose bytes changed."""
    for entry in store.entries:
        if entry.retired:
            continue
        with closing(Segment(store.directory / entry.name)) as segment:
            for row, lease_id in enumerate(segment.leases.tolist()):
                if lease_id in lease_ids:
                    yield segment.trajectory(row)
