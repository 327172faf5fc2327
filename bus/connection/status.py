"""Status of a process, sent twice a second in a small run: screens show it, and nothing depends on it."""

import asyncio
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bus.codec import Json
from bus.connection.bus import Bus
from bus.messages import Status, Wait
from bus.waiting import set_within

PERIOD_S = 0.5


@dataclass(frozen=True)
class Activity:
    """What a process does at one moment; `Status` has the meaning of each field."""

    doing: str
    values: dict[str, Json] = field(default_factory=dict)
    wait: Wait = ""
    reason: str = ""


async def report_status(
    bus: Bus, *, source: str, role: str, look: Callable[[], Activity], stop: asyncio.Event,
    waits_for: Callable[[], str] = str,
) -> None:  # fmt: skip
    """Send what `look` returns until `stop`, and once more then.

    It is sent twice a second, or as often as the pace of a run of many actors allows. `waits_for` returns
    what must happen before the process does its work, and nothing when it does: whoever probes it is told."""
    while True:
        stopping = stop.is_set()
        activity = look()
        doing, values = activity.doing, activity.values
        bus.state.waits_for = waits_for() or ("the end of its work" if stopping else "")
        if bus.signatures is not None and (complaint := bus.signatures.complaint()):
            doing = f"{complaint}; {doing}"
            values = {**values, "records_set_aside": bus.signatures.set_aside.total()}
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
            wait=activity.wait,
            reason=activity.reason,
            not_storing=tuple(sorted(bus.not_storing)),
        )
        bus.state.doing, bus.state.values = status.text, values
        await bus.notify(bus.subject("status", role), status)
        if stopping:
            return
        await set_within(stop, status.next_s)


def peak_rss_bytes(pid: int | None = None) -> int:
    """Return the peak resident memory of this process or of another since it began its program.

    `ru_maxrss` would include the memory of the parent at the fork. Without /proc the result is the current
    memory. Raises `psutil.NoSuchProcess` for a process that is gone."""
    process = psutil.Process(pid)
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except FileNotFoundError:
        status = ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else int(process.memory_info().rss)
