"""Roles that one process of a run holds at a time, such as its learner, by a renewed key with a fence."""

import asyncio
import os
import platform
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog

from bus.connection.bus import Bus
from bus.errors import BusError, ConfigError, FencedError
from bus.messages import RoleHolder
from bus.waiting import cancelled

T = TypeVar("T")
log = structlog.get_logger()
RENEW_S = 1.0
RELEASE_S = 2.0
"""Seconds for which a process that ends waits to leave its role; after that the role expires."""
EXPIRE_S = 6.0
"""Seconds without renewal after which a holder counts as dead."""


@asynccontextmanager
async def hold_role(bus: Bus, role: str, incarnation: str) -> AsyncIterator[asyncio.Task[None]]:
    """Hold `role` while inside; the task it yields ends with `FencedError` if somebody takes it over.

    Raises `ConfigError` as soon as a living process is seen to renew it; a dead one's is taken over after
    `EXPIRE_S`. The task outlives a bus that is away: the role is lost only to somebody else."""
    key = f"role.{role}"
    me = RoleHolder(incarnation=incarnation, host=platform.node(), pid=os.getpid(), pids_of=pids_of())
    revision = await _acquire(bus, key, role, me)
    renewing = asyncio.create_task(_renew(bus, key, role, me, revision), name=f"hold {role}")
    try:
        yield renewing
    finally:
        await cancelled(renewing)
        await _release(bus, key, role, me)


async def _acquire(bus: Bus, key: str, role: str, me: RoleHolder) -> int:
    found, lives = await _watched(bus, role)
    if found is not None and lives:
        raise ConfigError(
            f"run {bus.topology.run!r} already has a {role}: process {found[0].pid} on {found[0].host}. "
            "Stop it first, or start this one for another --run"
        )
    revision = await bus.swap(key, me, found[1] if found else 0)
    if revision is None:
        raise ConfigError(f"run {bus.topology.run!r}: another process became its {role} at the same moment")
    return revision


async def living_holder(bus: Bus, role: str) -> RoleHolder | None:
    """Return who holds a role and is seen to live: on this host, or as it renews the role. None after
    `EXPIRE_S` in which nobody did."""
    found, lives = await _watched(bus, role, trusts_pid=True)
    return found[0] if found is not None and lives else None


async def _watched(
    bus: Bus, role: str, *, trusts_pid: bool = False
) -> tuple[tuple[RoleHolder, int] | None, bool]:
    """Return the holder of a role with the revision of its record, and whether it was seen to renew the role
    within `EXPIRE_S`. With `trusts_pid` a process of its number on this host is it."""
    loop = asyncio.get_running_loop()
    found = await bus.get_settled(f"role.{role}", RoleHolder)
    seen, deadline = found[1] if found else 0, time.monotonic() + EXPIRE_S
    while found is not None:
        lives = lives_here(found[0])
        if lives is not False and (found[1] != seen or (lives and trusts_pid)):
            return found, True
        if lives is False or time.monotonic() >= deadline:
            break
        await asyncio.sleep(RENEW_S / 4)
        asked_s = loop.time()
        found = await bus.get_settled(f"role.{role}", RoleHolder)
        if loop.time() - asked_s > RENEW_S:  # the bus was away: the holder could not renew its role either
            deadline = time.monotonic() + EXPIRE_S
    return found, False


async def _renew(bus: Bus, key: str, role: str, me: RoleHolder, revision: int) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            async with asyncio.timeout(RENEW_S):  # short: while a renewal hangs, this process looks dead
                renewed = await bus.swap(key, me, revision) or await _still_mine(bus, key, me)
        except (TimeoutError, BusError) as error:
            log.warning("role_not_renewed", role=role, reason=str(error) or "no answer")
            continue
        if renewed is None:
            raise FencedError(f"another process took over as {role} of run {bus.topology.run!r}: stopping")
        revision = renewed


async def _still_mine(bus: Bus, key: str, me: RoleHolder) -> int | None:
    """Return our revision of the role, if an earlier renewal arrived, the bus lost its disk, or what somebody
    wrote there is not signed; else None."""
    found = await bus.get(key, RoleHolder)
    if found is None:
        return await bus.swap(key, me, 0)
    holder, revision = found
    return revision if holder == me else None


async def _release(bus: Bus, key: str, role: str, me: RoleHolder) -> None:
    try:
        async with asyncio.timeout(RELEASE_S):
            found = await bus.get(key, RoleHolder)
            if found is not None and found[0] == me:
                await bus.delete(key)
    except (TimeoutError, BusError) as error:  # the role expires by itself
        log.warning("role_not_released", role=role, reason=str(error) or "no answer")


def pids_of() -> str:
    """Return what tells apart the places in which process ids count: this boot, and this PID namespace.

    Containers share the name of a host, and numbers of processes, without sharing processes. The result is
    empty on a system that does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def lives_here(holder: RoleHolder) -> bool | None:
    """Return whether a process lives; None for one whose processes are not those of this place."""
    return _alive(holder.pid) if holder.pids_of == pids_of() != "" else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def guarded(work: Coroutine[None, None, T], renewing: asyncio.Task[None]) -> T:
    """Run `work` while the role is held; cancels it and raises `FencedError` if the role is lost."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, renewing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(task)
    if renewing.done():
        await renewing
    return await task
