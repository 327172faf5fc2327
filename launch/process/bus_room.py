"""The room on the disk of a bus, for which nats-server waits before it is started again."""

import asyncio
from pathlib import Path

import structlog

from bus.connection.process_state import ProcessState
from bus.waiting import set_within
from storage.disk.free_space import lack_of_room

log = structlog.get_logger()
PERIOD_S = 1.0
"""Time between two looks at the disk."""


async def until_full(directory: Path) -> str:
    """Return what is wrong once the disk of a directory is full."""
    while not (full := lack_of_room(directory)):  # noqa: ASYNC110 - of a disk nobody sets an event
        await asyncio.sleep(PERIOD_S)
    return full


async def has_room(directory: Path, state: ProcessState, stop: asyncio.Event) -> bool:
    """Wait until the disk of a directory has room; return False when `stop` came first.

    Until then the server stays as it is: it stores nothing, but carries what processes say of themselves."""
    while full := lack_of_room(directory):
        if state.doing != full:
            log.error("bus_waits_for_room", reason=full)
            state.wait_for(full)
        if await set_within(stop, PERIOD_S):
            return False
    return True
