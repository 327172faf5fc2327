"""Reads the complete groups in the stores of a run whose directory is here; who writes them may go on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import structlog

from bus.errors import ConfigError, LostDataError, StorageError
from bus.trajectory import Trajectory
from launch.run_view.run_files import recorded_config
from storage.disk.run_directory import RunDirectory
from storage.store.replay import ReplayStore, read_groups

log = structlog.get_logger()


class GroupReader:
    """Reads the stores as they were when they were opened; once anew, since storage may merge segments."""

    def __init__(self, open_stores: Callable[[], Sequence[ReplayStore]]) -> None:
        self._open_stores = open_stores
        self._stores: Sequence[ReplayStore] = ()
        self._openings = 0

    def open(self) -> None:
        """Open the stores as they are now."""
        self._stores = self._open_stores()
        self._openings += 1

    def complete(self) -> list[int]:
        """Return the leases of complete groups, ascending."""
        return sorted(lease for store in self._stores for lease in store.completed)

    def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        """Return the groups that are stored of these; retired and damaged ones are left out."""
        try:
            return read_groups(self._stores, leases)
        except (StorageError, LostDataError) as error:
            log.debug("groups_read_one_by_one", reason=str(error))
        if self._openings == 1:
            self.open()
        return [group for lease in leases for group in _readable(self._stores, lease)]


@contextmanager
def stored_groups(run: RunDirectory) -> Iterator[GroupReader]:
    """Open the stores of every shard. Raises `ConfigError` where shards are on other hosts."""
    with ExitStack() as stack:
        groups = GroupReader(lambda: stack.enter_context(_stores(run)))
        groups.open()
        yield groups


@contextmanager
def _stores(run: RunDirectory) -> Iterator[list[ReplayStore]]:
    shards = recorded_config(run).replay.shards
    paths = [run.path / "replay" / f"shard_{number:02d}" for number in range(shards)]
    if missing := [path for path in paths if not path.is_dir()]:
        raise ConfigError(f"{missing[0]} is missing: its shard is on another host")
    with ExitStack() as stack:
        opened = (ReplayStore.open(path, writable=False) for path in paths)
        yield [stack.enter_context(closing(store)) for store in opened]


def _readable(stores: Sequence[ReplayStore], lease: int) -> Iterator[list[Trajectory]]:
    try:
        yield from read_groups(stores, [lease])
    except (StorageError, LostDataError) as error:
        log.debug("group_not_shown", lease=lease, reason=str(error))
