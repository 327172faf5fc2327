"""`launch runs remove`: frees what a run that has ended holds on a bus and in its directory."""

import asyncio
import shutil
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

from bus.connection.bus import Bus
from bus.connection.roles import hold_role, lives_here
from bus.connection.server_clock import server_clock
from bus.errors import ConfigError
from bus.messages import RoleHolder
from bus.policy_names import DEFAULT_POLICY, policy_run
from bus.topology import remove, stored_bytes
from launch.run_view.recorded_runs import bytes_of, lock_files, recorded_runs
from launch.run_view.run_files import RunFiles
from launch.run_view.units import since
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import try_lock
from storage.disk.run_directory import RunDirectory, run_directories

ROLES = "dispatcher", "learner"
"""Roles that a process holds as long as the run goes on."""
GONE_S = 300.0
"""Silence after which a process that holds a role elsewhere counts as gone."""
ANSWER_S = 5.0


@dataclass(frozen=True)
class Holdings:
    """What a run holds, in bytes."""

    streams: dict[str, int]
    directory: Path | None
    directory_bytes: int = 0

    def __str__(self) -> str:
        lines = [f"{name} on the bus: {size / 1e6:.1f} MB" for name, size in sorted(self.streams.items())]
        if self.directory is not None:
            lines.append(f"{self.directory}: {self.directory_bytes / 1e6:.1f} MB")
        return "\n".join(lines)


async def remove_run(where: RunConfig, on_bus: bool, confirmed: bool, stop: asyncio.Event) -> Holdings:
    """Return what the run holds in its directory and, with `on_bus`, on the bus; remove it if `confirmed`.
    Raises `ConfigError` when there is no such run, or when a process of it still runs."""
    async with AsyncExitStack() as stack:
        each = [await _held(one, on_bus, stack) for one in _with_further_policies(where)]
        streams = {name: size for _, held in each for name, size in held.streams.items()}
        directories = [held.directory for _, held in each if held.directory is not None]
        if not streams and not directories:
            raise ConfigError(
                f"there is no run {where.run!r} in {where.directory}{' or on this bus' if on_bus else ''}: "
                "name it with --run, --directory and --bus"
            )
        if confirmed:
            for bus, held in each:
                if bus is not None:
                    await remove(bus.js, bus.topology)
                if held.directory is not None:
                    await asyncio.to_thread(shutil.rmtree, held.directory)
        return Holdings(
            streams, directories[0] if directories else None, sum(h.directory_bytes for _, h in each)
        )


def _with_further_policies(where: RunConfig) -> list[RunConfig]:
    """Return where the run is, and where those of its further policies are, which have directories beside
    its own. A run that only has such a name trains no policy of it."""
    beside = run_directories(where.directory) if where.directory.is_dir() else []
    names = [
        path.name for path in beside
        if (policy := RunFiles(path, lenient=True).settings.get("trains")) != DEFAULT_POLICY
        and path.name == policy_run(where.run, str(policy))
    ]  # fmt: skip
    return [where, *(where.model_copy(update={"run": name}) for name in names)]


async def _held(where: RunConfig, on_bus: bool, stack: AsyncExitStack) -> tuple[Bus | None, Holdings]:
    """Take the roles and locks of a run, until the end of the stack, and return what it holds."""
    run = RunDirectory(where.directory, where.run)
    bus, streams = None, {}
    if on_bus:
        bus = await stack.enter_async_context(Bus.connect(where.bus, where.run, name="runs"))
        streams = await stored_bytes(bus.js, bus.topology)
        if streams:
            await bus.create_keys()
            for role in ROLES:
                await _refuse_heard(bus, role)
                await stack.enter_async_context(hold_role(bus, role, "removal"))
    if not run.exists:
        return bus, Holdings(streams, None)
    if recorded_runs([run.path])[0].state == "unseen":
        raise ConfigError(
            f"run {run.name!r} is of another user or host, where it may go on: stop it there first; if that "
            f"host is gone, remove {run.path / 'ending.json'}"
        )
    _refuse_used(run.path, stack)
    return bus, Holdings(streams, run.path, await asyncio.to_thread(bytes_of, run.path))


async def _refuse_heard(bus: Bus, role: str) -> None:
    """Raise `ConfigError` where a process that was heard lately holds a role: it may be busy or suspended."""
    found, clock = await bus.get_written(f"role.{role}", RoleHolder), await server_clock(bus, ANSWER_S)
    if found is None or clock is None or lives_here(found[0]) is False:
        return
    (holder, renewed_s), now_s = found, time.time()
    renewed_s -= clock.ahead_s
    if now_s - renewed_s < GONE_S:
        raise ConfigError(
            f"run {bus.topology.run!r} already has a {role}: process {holder.pid} on {holder.host}, heard "
            f"last at {since(renewed_s, now_s)}. Stop it first; if it is gone, try again after {GONE_S:g} s"
        )


def _refuse_used(directory: Path, stack: ExitStack | AsyncExitStack) -> None:
    """Take the locks of the run's processes. Raises `ConfigError` naming one that is taken."""
    for path in lock_files(directory):
        if not try_lock(stack.enter_context(path.open("a"))):
            raise ConfigError(f"{path} is held by a running process: stop the run first")
