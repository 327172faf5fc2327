"""A run on a bus that goes away for longer than any process of the run waits for one answer."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from bus.server.nats_server import NatsServer
from tests.e2e.commands import GROUPS, LONG, SAMPLES, STEPS, Command, assert_whole, wait_for_step

OUTAGE_S = 40.0


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(900)
async def test_a_run_goes_on_where_it_was_after_the_bus_was_away_and_after_it_was_silent(tmp_path: Path):
    async with NatsServer(tmp_path / "nats") as server:
        launcher = Command(tmp_path, "local", *LONG, "--bus.url", server.url)
        run = tmp_path / "runs/sort"
        try:
            await asyncio.to_thread(wait_for_step, launcher, run, 3, timeout_s=300)
            await server.kill()
            await asyncio.sleep(OUTAGE_S)
            await server.start()
            await asyncio.to_thread(wait_for_step, launcher, run, 8)
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.sleep(OUTAGE_S)
            os.kill(server.pid, signal.SIGCONT)
            assert await asyncio.to_thread(launcher.wait, 300) == 0, launcher.said()
        finally:
            launcher.kill()
    assert_whole(run, STEPS, GROUPS, SAMPLES)
    assert "part_restarts" not in launcher.said()
    logs = {part: (run / f"logs/{part}.log").read_text() for part in ("actors", "learner", "storage")}
    assert {part for part, log in logs.items() if "waiting_for_the_bus" in log} >= {"actors"}
    assert all("Traceback" not in log for log in logs.values())
