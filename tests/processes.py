"""Processes that stand still."""

import asyncio
import os
import signal
from pathlib import Path


async def suspend(pid: int) -> None:
    """Return once the process has stopped: the signal takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not _stopped(pid):  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


def _stopped(pid: int) -> bool:
    """Tell whether none of a process's threads runs."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2][0] == "T" for stat in stats)
