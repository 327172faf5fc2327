"""What the dashboard holds of the runs that somebody looks at."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bus.errors import ConfigError
from launch.dashboard.alerts import RunAlerts
from launch.dashboard.curve_feed import CurveFeed
from launch.dashboard.metrics_source import Locate
from launch.dashboard.run_list import run_names
from launch.dashboard.status_watch import StatusWatch
from launch.trajectories.held_out import HeldOutTrajectories
from launch.trajectories.sources import BusTrajectories, StoredTrajectories, TrajectorySource
from launch.trajectories.stored_groups import has_stores
from storage.disk.run_directory import RunDirectory

Removal = Callable[[str], Awaitable[object]]
MOST = 16
"""Runs whose curves are held; those that were looked at longest ago are read again."""


class OpenRuns:
    """The runs of a directory, and a further one that may be on the bus alone."""

    def __init__(
        self, root: Path, locate: Locate, named: str | None = None, *, remove: Removal | None = None
    ) -> None:
        self.root = root
        self.named = named
        self._locate = locate
        self._remove = remove
        self._feeds: OrderedDict[str, CurveFeed] = OrderedDict()
        self._watches: dict[str, StatusWatch] = {}
        self._alerts: dict[str, RunAlerts] = {}
        self._sources: dict[tuple[str, str], TrajectorySource] = {}

    def names(self) -> list[str]:
        """Return the names of the runs, that of the command line first, then the latest used."""
        found = run_names(self.root)
        return [*dict.fromkeys([self.named, *found] if self.named is not None else found)]

    def curves(self, name: str) -> CurveFeed:
        """Return the curves of a run. Raises `ConfigError` for what cannot be a run's name."""
        if name not in self._feeds:
            self._feeds[name] = CurveFeed(RunDirectory(self.root, name), self._locate)
            if len(self._feeds) > MOST:
                self._feeds.popitem(last=False)
        self._feeds.move_to_end(name)
        return self._feeds[name]

    def status(self, name: str) -> StatusWatch:
        if name not in self._watches:
            self._watches[name] = StatusWatch(name, self._locate)
        return self._watches[name]

    def alerts(self, name: str) -> RunAlerts:
        if name not in self._alerts:
            self._alerts[name] = RunAlerts(self.root, name)
        return self._alerts[name]

    def trajectories(self, name: str, *, held_out: bool = False) -> TrajectorySource:
        """Return what reads the trajectories of a run: its stores, once they are here. With `held_out`,
        return what reads its answers to held-out prompts."""
        run = RunDirectory(self.root, name)
        if held_out:
            return self._sources.setdefault((name, "held out"), HeldOutTrajectories(run))
        if has_stores(run):
            return self._sources.setdefault((name, "stored"), StoredTrajectories(run))
        return self._sources.setdefault((name, "bus"), BusTrajectories(partial(self._locate, name)))

    async def remove(self, name: str) -> None:
        """Remove a run, and what is held of it. Raises `ConfigError` for one that goes on."""
        if self._remove is None:
            raise ConfigError("this dashboard removes no runs: `launch runs remove` does")
        await self._remove(name)
        self._feeds.pop(name, None)
        self._alerts.pop(name, None)
        for kind in ("held out", "stored", "bus"):
            self._sources.pop((name, kind), None)
        if (watch := self._watches.pop(name, None)) is not None:
            await watch.close()

    async def close(self) -> None:
        for watch in self._watches.values():
            await watch.close()
