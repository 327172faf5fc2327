import asyncio
import platform
import subprocess
import sys

import psutil
import pytest

from bus.connection.status import Activity, peak_rss_bytes, report_status
from bus.messages import Status


@pytest.mark.nats
async def test_status_comes_at_once_repeatedly_and_a_last_time_at_the_end(bus):
    heard, stop = [], asyncio.Event()
    doing = iter(["starting", *["working"] * 2, *["ending"] * 100])
    enough = asyncio.Event()

    def hear(status: Status) -> None:
        heard.append(status)
        if len(heard) == 2:
            enough.set()

    await bus.listen(bus.subject("status", "*"), Status, hear)
    reporting = asyncio.create_task(
        report_status(
            bus,
            source="me",
            role="actor",
            look=lambda: Activity(next(doing), {"n": 1}, wait="batch", reason="late"),
            stop=stop,
        )
    )
    async with asyncio.timeout(60):
        await enough.wait()
        stop.set()
        await reporting
        await bus.client.flush()
        while len(heard) < 3:  # noqa: ASYNC110 - the callback has no event for it
            await asyncio.sleep(0.01)
    assert [status.doing for status in heard[:2]] == ["starting", "working"]
    assert {(status.wait, status.text.partition(": ")[2]) for status in heard} == {("batch", "late")}
    assert all(status.peak_rss_bytes > 1 << 20 and status.values == {"n": 1} for status in heard)
    began = {(status.host, status.started_s) for status in heard}
    assert began == {(platform.node(), psutil.Process().create_time())}


@pytest.mark.slow
def test_peak_memory_is_the_programs_own_not_its_parents():
    ballast = bytearray(300 << 20)
    script = "from bus.connection.status import peak_rss_bytes; print(peak_rss_bytes())"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(child.stdout) < len(ballast) < peak_rss_bytes()
