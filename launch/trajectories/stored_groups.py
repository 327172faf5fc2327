"""Reads the complete groups in the stores of a run whose directory is here; who writes them may go on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import structlog

from bus.errors import ConfigError, LostDataError, StorageError
from bus.trajectory import Trajectory
from launch.run_view.run_files import recorded_config
from storage.disk.run_directory import RunDirectory
from storage.store.replay import ReplayStore, read_groups

log = structlog.get_logger()


class GroupReader:
    """Reads the stores as they were when they were opened last; once anew, since storage may merge
    segments."""

    def __init__(self, open_stores: Callable[[], AbstractContextManager[Sequence[ReplayStore]]]) -> None:
        self._open_stores = open_stores
        self._stores: Sequence[ReplayStore] = ()
        self._opened = ExitStack()
        self._opened_anew = False
        self.left_out: dict[int, str] = {}
        """Why groups could not be read, by lease."""

    def open(self) -> None:
        """Open the stores as they are now; what was read of them before stays readable."""
        self._opened.close()
        self._stores = self._opened.enter_context(self._open_stores())
        self._opened_anew = False

    def close(self) -> None:
        self._opened.close()

    def complete(self) -> list[int]:
        return sorted(lease for store in self._stores for lease in store.completed)

    def read(self, leases: Sequence[int]) -> list[list[Trajectory]]:
        """Return the groups that are stored of these; retired and damaged ones are `left_out`."""
        try:
            return read_groups(self._stores, leases)
        except (StorageError, LostDataError) as error:
            log.debug("groups_read_one_by_one", reason=str(error))
        if not self._opened_anew:
            self.open()
            self._opened_anew = True
        return [group for lease in leases for group in self._readable(lease)]

    def _readable(self, lease: int) -> list[list[Trajectory]]:
        try:
            return read_groups(self._stores, [lease])
        except (StorageError, LostDataError) as error:
            self.left_out[lease] = str(error)
            return []


@contextmanager
def stored_groups(run: RunDirectory) -> Iterator[GroupReader]:
    """Open the stores of every shard. Raises `ConfigError` where shards are on other hosts."""
    with closing(GroupReader(partial(open_stores, run, recorded_config(run).replay.shards))) as groups:
        groups.open()
        yield groups


def has_stores(run: RunDirectory) -> bool:
    if not run.exists or not run.config.exists():
        return False
    return all(path.is_dir() for path in _paths(run, recorded_config(run).replay.shards))


def _paths(run: RunDirectory, shards: int) -> list[Path]:
    return [run.path / "replay" / f"shard_{number:02d}" for number in range(shards)]


@contextmanager
def open_stores(run: RunDirectory, shards: int) -> Iterator[list[ReplayStore]]:
    """Open the store of every shard for reading; a storage that writes them may go on. Raises `ConfigError`
    where shards are on other hosts."""
    paths = _paths(run, shards)
    if missing := [path for path in paths if not path.is_dir() or not any(path.iterdir())]:
        raise ConfigError(f"{missing[0]} is missing or empty: its shard is on another host, copy it here")
    with ExitStack() as stack:
        opened = (ReplayStore.open(path, writable=False) for path in paths)
        yield [stack.enter_context(closing(store)) for store in opened]
