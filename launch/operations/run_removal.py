"""`launch runs remove`: frees what a run that has ended holds on a bus and in its directory."""

import asyncio
import shutil
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from bus.connection.bus import Bus
from bus.connection.roles import hold_role
from bus.errors import ConfigError
from bus.topology import remove, stored_bytes
from launch.run_view.recorded_runs import bytes_of
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import try_lock
from storage.disk.run_directory import RunDirectory

ROLES = "dispatcher", "learner"
"""Roles that a process holds as long as the run goes on."""


@dataclass(frozen=True)
class Holdings:
    """What a run holds, in bytes."""

    streams: dict[str, int]
    """Streams on the bus by name."""
    directory: Path | None
    """The run's directory, if there is one here."""
    directory_bytes: int = 0

    def __str__(self) -> str:
        """Return one line for each stream and for the directory."""
        lines = [f"{name} on the bus: {size / 1e6:.1f} MB" for name, size in sorted(self.streams.items())]
        if self.directory is not None:
            lines.append(f"{self.directory}: {self.directory_bytes / 1e6:.1f} MB")
        return "\n".join(lines)


async def remove_run(where: RunConfig, on_bus: bool, confirmed: bool, stop: asyncio.Event) -> Holdings:
    """Return what the run holds in its directory and, with `on_bus`, on the bus; remove it if `confirmed`.

    Raises `ConfigError` when there is no such run, or when a process of it still runs.
    """
    run = RunDirectory(where.directory, where.run)
    async with AsyncExitStack() as stack:
        bus, streams = None, {}
        if on_bus:
            bus = await stack.enter_async_context(Bus.connect(where.bus, where.run, name="runs"))
            streams = await stored_bytes(bus.js, bus.topology)
        size = await asyncio.to_thread(bytes_of, run.path) if run.exists else 0
        found = Holdings(streams, run.path if run.exists else None, size)
        if not streams and found.directory is None:
            raise ConfigError(
                f"there is no run {where.run!r} in {where.directory}{' or on this bus' if on_bus else ''}: "
                "name it with --run, --directory and --bus"
            )
        if bus is not None and streams:
            await bus.create_keys()
            for role in ROLES:
                await stack.enter_async_context(hold_role(bus, role, "removal"))
        if found.directory is not None:
            _refuse_used(found.directory, stack)
        if confirmed:
            if bus is not None:
                await remove(bus.js, bus.topology)
            if found.directory is not None:
                await asyncio.to_thread(shutil.rmtree, found.directory)
        return found


def _refuse_used(directory: Path, stack: ExitStack | AsyncExitStack) -> None:
    """Take the locks of the run's supervisor and shards. Raises `ConfigError` naming one that is taken."""
    for path in (directory / "lock", *directory.glob("replay/*/.lock")):
        if path.exists() and not try_lock(stack.enter_context(path.open("a"))):
            raise ConfigError(f"{path} is held by a running process: stop the run first")
