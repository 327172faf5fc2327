"""Takes what is new in the files of a run: rows of its metrics, and trajectories of complete groups."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from bus.errors import ConfigError
from bus.trajectory import Trajectory
from launch.dashboard.metrics_source import MetricsFile
from launch.trajectories.stored_groups import stored_groups
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import Record

T = TypeVar("T")
AT_ONCE = 64
"""Most groups whose trajectories are taken at a time."""


def new_rows(run: RunDirectory) -> Callable[[], Sequence[Record]]:
    """Return what takes the next rows of metrics.jsonl, from the first one on."""
    file = MetricsFile(run.metrics)
    return lambda: file.take() if file.exists else ()


def new_values(
    run: RunDirectory, wanted: Callable[[Record], bool], made: Callable[[Record], T]
) -> Callable[[], Sequence[T]]:
    """Return what takes the next rows that are wanted, made into values."""
    rows = new_rows(run)

    def take() -> Sequence[T]:
        while found := rows():  # an empty answer would say that there are no more rows
            if values := [made(row) for row in found if wanted(row)]:
                return values
        return ()

    return take


@dataclass
class NewTrajectories:
    """Takes trajectories in the order of their leases, as far as their groups are complete."""

    run: RunDirectory
    running: Callable[[], bool]
    """Says whether processes of the run go on, which may still make its stores."""
    taken: set[int] = field(default_factory=set)
    """Leases of the groups that were taken."""
    waiting: deque[int] = field(default_factory=deque)
    """Leases of complete groups that are taken next."""

    def __call__(self) -> Sequence[Trajectory]:
        """Return the trajectories of up to `AT_ONCE` groups. Raises `ConfigError` where no stores are."""
        if not self.run.config.exists() and self.running():
            return ()
        try:
            with stored_groups(self.run) as groups:
                if not self.waiting:
                    self.waiting.extend(lease for lease in groups.complete() if lease not in self.taken)
                while self.waiting:  # an empty answer would say that nothing is left
                    leases = list(islice(self.waiting, AT_ONCE))
                    found = [trajectory for group in groups.read(leases) for trajectory in group]
                    self.taken.update(self.waiting.popleft() for _ in leases)
                    if found:
                        return found
                return ()
        except ConfigError:
            if self.running():  # its storage makes them
                return ()
            raise
