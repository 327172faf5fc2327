"""Many settled groups are read in few passes over the segments, whatever their number."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bus.codec import encode
from bus.errors import LostDataError, StorageError
from bus.trajectory import TrajectoryBatch
from learner.history.retrain import _groups
from learner.progress.lineage import TrainedStep
from soak.trajectory_account import _stored_lengths, each_trajectory
from storage.disk.run_directory import RunDirectory
from storage.store import layout
from storage.store.replay import ReplayStore, read_groups
from storage.store.segments import FILE, Segment
from tests.factories import make_trajectory

SHARDS, GROUPS, SAMPLES, SEGMENTS = 2, 48, 4, 12
LEASES = range(GROUPS)


def length(lease: int, sample: int) -> int:
    return 4 + (7 * lease + sample) % 11


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two shards whose groups are settled, and of which each lies in four segments of its shard."""
    run = RunDirectory(tmp_path, "ended")
    for shard in range(SHARDS):
        with closing(ReplayStore.open(run.replay(shard))) as store:
            of_shard = [
                make_trajectory(lease, n, group_size=SAMPLES, tokens=length(lease, n))
                for n in range(SAMPLES)
                for lease in LEASES[shard::SHARDS]
            ]
            for first in range(0, len(of_shard), len(of_shard) // SEGMENTS):
                store.append(of_shard[first : first + len(of_shard) // SEGMENTS])
            store.settle(GROUPS, [], seen=GROUPS // SHARDS)
            assert store.rows_in_memory == 0
    return run


@pytest.fixture
def stores(run: RunDirectory) -> Iterator[list[ReplayStore]]:
    with ExitStack() as stack:
        opened = (ReplayStore.open(run.replay(n), writable=False) for n in range(SHARDS))
        yield [stack.enter_context(closing(store)) for store in opened]


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths of the segments that are opened, with few that stay mapped."""
    opened: list[Path] = []
    made = Segment.__init__

    def opening(self: Segment, path: Path) -> None:
        opened.append(path)
        made(self, path)

    monkeypatch.setattr(Segment, "__init__", opening)
    monkeypatch.setattr(layout, "MAPPED_SEGMENTS", 2)
    return opened


def test_the_groups_of_a_step_are_read_with_two_openings_of_a_segment_at_most(
    openings: list[Path], stores: list[ReplayStore]
):
    """One finds the rows, one reads them; to read each group alone opens segments for each group."""
    step = TrainedStep(step=1, policy_version=1, incarnation="a", leases=tuple(reversed(LEASES)))
    groups = _groups(stores, step)
    assert [[t.trajectory_id for t in group] for group in groups] == [
        [f"g{lease:08d}.{n}" for n in range(SAMPLES)] for lease in reversed(LEASES)
    ]
    assert len(openings) <= 2 * SHARDS * SEGMENTS


def test_the_account_opens_each_segment_twice(openings: list[Path], run: RunDirectory):
    """Once to see which groups are whole, and once to read them."""
    lengths = _stored_lengths(run, SHARDS, lambda: None)
    assert {lease: len(of_group) for lease, of_group in lengths.items()} == dict.fromkeys(LEASES, SAMPLES)
    assert all(sorted(lengths[n]) == sorted(length(n, m) for m in range(SAMPLES)) for n in LEASES)
    assert len(openings) == 2 * SHARDS * SEGMENTS


def test_each_trajectory_of_the_groups_asked_for_is_as_it_was_stored(stores: list[ReplayStore]):
    wanted = {0, 6, 46}
    found = sorted(each_trajectory(stores[0], wanted), key=lambda t: t.trajectory_id)
    again = [t for group in read_groups(stores, sorted(wanted)) for t in group]
    assert [encode(TrajectoryBatch(trajectories=(t,))) for t in found] == [
        encode(TrajectoryBatch(trajectories=(t,))) for t in again
    ]


def test_a_group_that_a_step_was_given_twice_is_there_twice(stores: list[ReplayStore]):
    one, other, again = read_groups(stores, [3, 4, 3])
    assert [t.lease_id for t in one] == [t.lease_id for t in again] == [3] * SAMPLES
    assert [t.lease_id for t in other] == [4] * SAMPLES


def test_what_cannot_be_read_is_told_of(stores: list[ReplayStore]):
    with pytest.raises(StorageError, match="group of lease 99 cannot be read"):
        read_groups(stores, [0, 99])
    path = stores[1].directory / stores[1].entries[5].name / FILE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(LostDataError, match="segment_00000005 is torn"):
        list(each_trajectory(stores[1], LEASES))
