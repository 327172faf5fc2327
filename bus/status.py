"""Every process says about once a second what it is doing: screens read it, nothing depends on it."""

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil

from bus.codec import Json
from bus.connection import Bus
from bus.messages import Status
from bus.waiting import set_within

PERIOD_S = 0.5
REMEDY = "restart nats-server"
"""It leaves a stream alone once a write has failed, as on a full disk; `launch bus` does this by itself."""


async def report_status(
    bus: Bus, *, source: str, role: str, look: Callable[[], tuple[str, dict[str, Json]]], stop: asyncio.Event
) -> None:
    """Send what `look` returns, one phrase and some numbers, until `stop`, and once more then."""
    while True:
        stopping = stop.is_set()
        doing, values = look()
        if bus.not_storing:
            doing = f"the bus stores nothing on {', '.join(sorted(bus.not_storing))}: {REMEDY}; {doing}"
        status = Status(
            source=source,
            role=role,
            doing=doing,
            pid=os.getpid(),
            peak_rss_bytes=peak_rss_bytes(),
            values=values,
        )
        await bus.notify(bus.subject("status", role), status)
        if stopping:
            return
        await set_within(stop, PERIOD_S)


def peak_rss_bytes(pid: int | None = None) -> int:
    """The most resident memory that this process, or another, had since it began its program.

    Not `ru_maxrss`, which counts what the parent held when it forked. Where there is no /proc, it is what the
    process has now. Raises `psutil.NoSuchProcess` for one that is gone.
    """
    process = psutil.Process(pid)
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        status = ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else int(process.memory_info().rss)
