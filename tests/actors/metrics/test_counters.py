"""An actor's counters on the run's record."""

import asyncio

import pytest

from actors.metrics import counters
from actors.metrics.counters import report_metrics
from bus.connection import Bus
from bus.messages import Metrics
from bus.security.permissions import COUNTERS


@pytest.mark.nats
@pytest.mark.parametrize(("slower", "repeated"), [(1.0, True), (1.1, False)])
async def test_counters_that_stay_as_they_are_are_left_out_in_a_large_run_only(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, slower: float, repeated: bool
):
    monkeypatch.setattr(counters, "PERIOD_S", 0.02)
    bus.slower = slower
    heard: list[Metrics] = []
    stop, looks = asyncio.Event(), 0

    def look() -> tuple[int, dict[str, int]]:
        nonlocal looks
        looks += 1
        if looks == 11:  # the first is for whoever asks at once
            stop.set()
        return 0, {"engine/tokens": looks // 10}

    await bus.listen(bus.subject(COUNTERS), Metrics, heard.append)
    async with asyncio.timeout(60):
        await report_metrics(bus, source="me", look=look, stop=stop)
        await bus.client.flush()
    tokens = [metrics.values["engine/tokens"] for metrics in heard]
    assert tokens == ([0] * 8 + [1] * 2 if repeated else [0, 1])
