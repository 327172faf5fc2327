"""Locks in a run's directory: what writes there is one process at a time."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from bus.waiting import RETRY_S
from launch.run_view.recorded_runs import going_on
from storage.disk.atomic_files import try_lock


@asynccontextmanager
async def only_process(lock: Path, *, patience_s: float) -> AsyncIterator[int]:
    """Hold the lock file of a run; yields its descriptor.

    Raises `ConfigError` where another process has it. Processes that inherited it from one that has ended may
    hold it for `patience_s` longer."""
    with lock.open("a+") as file:
        deadline = time.monotonic() + patience_s
        while not try_lock(file):
            file.seek(0)
            holder = int(file.read() or "0")
            if psutil.pid_exists(holder) or time.monotonic() > deadline:
                raise going_on(lock.parent, holder)
            await asyncio.sleep(RETRY_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()
