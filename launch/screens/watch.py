"""`launch watch`: shows on any host how a run goes on, from what the bus has."""

import asyncio

import structlog
from rich.console import Console

from bus.connection.bus import Bus
from bus.waiting import set_within
from launch.process.run_connection import joined
from launch.run_view.monitor import RunMonitor, RunSettings, watch
from launch.screens.terminal_view import TerminalView
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory

log = structlog.get_logger()
LOOK_S = 0.5


async def watch_run(where: RunConfig, stop: asyncio.Event, *, console: Console | None = None) -> None:
    """Show the run until `stop`, or until its learner is done and has ended. It changes nothing in the run.
    Raises `BusAwayError` when no run of this name is on the bus."""
    directory = RunDirectory(where.directory, where.run)
    async with Bus.connect(where.bus, where.run, name="watch", stop=stop) as bus:
        config = await joined(bus, where, {}, stop)
        if config is None:
            return
        monitor, gone = RunMonitor(RunSettings.of_run(config)), asyncio.Event()
        recorded = directory if directory.exists and directory.recorded.exists() else None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(bus, monitor, gone, run=recorded))
            tasks.create_task(TerminalView(monitor, console or Console()).run(gone))
            try:
                while not (stop.is_set() or monitor.learner_has_ended):
                    await set_within(stop, LOOK_S)
            finally:
                gone.set()
