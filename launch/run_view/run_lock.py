"""Locks in a run's directory: what writes there is one process at a time."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import psutil
import structlog

from bus.connection.roles import pids_of
from bus.waiting import RETRY_S
from launch.run_view.recorded_runs import going_on
from storage.disk.atomic_files import try_lock

log = structlog.get_logger()
SAY_AFTER_S = 2.0
"""Seconds after which it is said what is waited for."""


@asynccontextmanager
async def only_process(lock: Path, *, patience_s: float) -> AsyncIterator[int]:
    """Hold the lock file of a run; yields its descriptor. Raises `ConfigError` where another process has it.
    Processes that inherited it from one that has ended may hold it for `patience_s` longer."""
    with lock.open("a+") as file:
        began = time.monotonic()
        say_at = began + SAY_AFTER_S
        while not try_lock(file):
            file.seek(0)
            pid, _, place = file.read().partition("\n")
            holder = int(pid or "0")
            if place not in ("", pids_of()):  # there the number is of another process
                raise going_on(lock.parent, f"{holder} of another container or host")
            if psutil.pid_exists(holder) or time.monotonic() > began + patience_s:
                raise going_on(lock.parent, str(holder))
            if time.monotonic() > say_at:
                say_at = inf
                log.warning(
                    "waiting_for_earlier_processes", lock=str(lock), ended=holder, longest_s=patience_s
                )
            await asyncio.sleep(RETRY_S)
        file.truncate(0)
        file.write(f"{os.getpid()}\n{pids_of()}")
        file.flush()
        yield file.fileno()
