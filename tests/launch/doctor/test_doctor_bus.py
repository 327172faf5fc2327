"""`launch doctor`: what it finds of a real bus, and of its clock."""

import os
import signal
import time

import pytest

from bus.connection.bus import Bus
from bus.server.nats_server import NatsServer, free_port
from launch.doctor import bus as checked
from launch.doctor.bus import check_bus
from launch.doctor.findings import Finding
from launch.settings.run_config import RunConfig, resolve
from tests.processes import suspend

pytestmark = pytest.mark.nats


@pytest.fixture
def config(bus_server: NatsServer) -> RunConfig:
    return resolve({"run": "test", "bus": {"url": bus_server.url}})


async def findings(config: RunConfig) -> dict[str, Finding]:
    return {finding.check: finding async for finding in check_bus(config, named=True)}


async def test_a_bus_that_answers_is_well_and_its_clock_is_compared(bus: Bus, config: RunConfig):
    found = await findings(config)
    assert found["bus"].level == found["clock"].level == "ok"
    assert f"{config.bus.url} answers within" in found["bus"].found
    assert "that of the bus is 0.0" in found["clock"].found


@pytest.mark.parametrize(("shift_s", "direction"), [(5.0, "behind"), (-5.0, "ahead")])
async def test_a_clock_that_differs_is_a_warning(
    shift_s: float, direction: str, bus: Bus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    now = time.time
    monkeypatch.setattr(checked.time, "time", lambda: now() + shift_s)
    clock = (await findings(config))["clock"]
    assert clock.level == "warning"
    assert clock.found.startswith("that of the bus is ")
    assert direction in clock.found
    assert float(clock.found.split()[5]) == pytest.approx(5.0, abs=0.5)
    assert "synchronise the clocks" in clock.remedy


async def test_a_bus_without_the_run_tells_no_time_and_is_left_as_it_was(config: RunConfig, bus_server):
    other = config.model_copy(update={"run": "other"})
    clock = (await findings(other))["clock"]
    assert (clock.level, "this bus has no run 'other'" in clock.found) == ("ok", True)
    async with Bus.connect(config.bus, "other", name="look") as bus:
        assert (await bus.js.account_info()).streams == 0


async def test_a_bus_that_is_away_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked, "CONNECT_S", 0.3)
    url = f"nats://me:hunter2@127.0.0.1:{free_port('127.0.0.1')}"
    [found] = (await findings(resolve({"bus": {"url": url}}))).values()
    assert (found.check, found.level) == ("bus", "error")
    assert "hunter2" not in str(found)
    assert "is `launch bus` running there" in found.remedy


async def test_a_bus_that_falls_silent_is_an_error(
    bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checked, "TRIP_S", 0.1)
    await suspend(server.pid)
    try:
        [found] = [finding async for finding in checked._look(bus, server.url)]
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (found.check, found.level) == ("bus", "error")
    assert "does not answer: nats: flush timeout" in found.found
    assert "nats-server suspended" in found.remedy


async def test_a_bus_that_nobody_named_is_not_asked():
    [found] = [finding async for finding in check_bus(RunConfig(), named=False)]
    assert (found.level, found.found) == ("ok", "none is named: `launch local` starts one")
