"""Status of a process, sent twice a second in a small run: screens show it, and nothing depends on it."""

import asyncio
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

import psutil

from bus.codec import Json
from bus.connection.bus import Bus
from bus.messages import Status
from bus.waiting import set_within

PERIOD_S = 0.5
REMEDY = "restart nats-server"
"""Remedy for a stream that nats-server no longer writes after a failed write; `launch bus` does it itself."""


async def report_status(
    bus: Bus, *, source: str, role: str, look: Callable[[], tuple[str, dict[str, Json]]], stop: asyncio.Event,
    waits_for: Callable[[], str] = str,
) -> None:  # fmt: skip
    """Send what `look` returns, a phrase and some numbers, until `stop`, and once more then.

    It is sent twice a second, or as often as the pace of a run of many actors allows. `waits_for` returns
    what must happen before the process does its work, and nothing when it does: whoever probes it is told."""
    while True:
        stopping = stop.is_set()
        doing, values = look()
        bus.state.waits_for = waits_for() or ("the end of its work" if stopping else "")
        if bus.not_storing:
            doing = f"the bus stores nothing on {', '.join(sorted(bus.not_storing))}: {REMEDY}; {doing}"
        if bus.signatures is not None and (complaint := bus.signatures.complaint()):
            doing = f"{complaint}; {doing}"
            values = {**values, "records_set_aside": bus.signatures.set_aside.total()}
        bus.state.doing, bus.state.values = doing, values
        status = Status(
            source=source,
            role=role,
            doing=doing,
            pid=os.getpid(),
            peak_rss_bytes=peak_rss_bytes(),
            values=values,
            host=platform.node(),
            started_s=psutil.Process().create_time(),
            next_s=PERIOD_S * bus.slower,
            revision=bus.state.revision,
            settings_differ=bus.state.settings_differ,
        )
        await bus.notify(bus.subject("status", role), status)
        if stopping:
            return
        await set_within(stop, status.next_s)


def peak_rss_bytes(pid: int | None = None) -> int:
    """Return the peak resident memory of this process or of another since it began its program.

    `ru_maxrss` would include the memory of the parent at the fork. Without /proc the result is the current
    memory. Raises `psutil.NoSuchProcess` for a process that is gone.
    """
    process = psutil.Process(pid)
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        status = ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else int(process.memory_info().rss)
