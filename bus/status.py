"""Every process says about once a second what it is doing: screens read it, nothing depends on it."""

import asyncio
import os
import resource
from collections.abc import Callable

from bus.codec import Json
from bus.connection import Bus
from bus.messages import Status

PERIOD_S = 0.5


async def report_status(
    bus: Bus, *, source: str, role: str, look: Callable[[], tuple[str, dict[str, Json]]], stop: asyncio.Event
) -> None:
    """Send what `look` returns, one phrase and some numbers, until `stop`, and once more then."""
    while True:
        stopping = stop.is_set()
        doing, values = look()
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
        try:
            async with asyncio.timeout(PERIOD_S):
                await stop.wait()
        except TimeoutError:
            continue


def peak_rss_bytes() -> int:
    """The most resident memory this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
