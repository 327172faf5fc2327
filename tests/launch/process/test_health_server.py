import asyncio
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bus.config import BusConfig
from bus.connection import process_state
from bus.connection.bus import Bus
from bus.connection.process_state import ProcessState
from bus.connection.status import Activity, report_status
from bus.errors import ConfigError
from bus.server.nats_server import NatsServer, free_port
from launch.process.health_server import monitored
from launch.settings.run_config import MonitoringConfig
from tests.launch.health_answers import get, numbers


async def until(url: str, holds: Callable[[int, str], bool]) -> str:
    """Return an answer for which `holds`, asked for from another thread."""
    async with asyncio.timeout(60):
        while not holds(*(answer := await asyncio.to_thread(get, url))):  # noqa: ASYNC110 - a server has no event for it
            await asyncio.sleep(0.02)
    return answer[1]


def serving(port: int, state: ProcessState, **settings: float):
    return monitored(MonitoringConfig(port=port, **settings), state), f"http://127.0.0.1:{port}"


async def test_a_stuck_event_loop_is_noticed_and_one_that_turns_again_is_healthy(monkeypatch):
    monkeypatch.setattr(process_state, "TURN_S", 0.02)
    server, url = serving(free_port("127.0.0.1"), ProcessState("actors", "mine"), stuck_after_s=0.2)
    async with server:
        assert await until(f"{url}/healthz", lambda status, _: status == 200) == "healthy\n"
        deadline = time.monotonic() + 60
        while (answer := get(f"{url}/healthz"))[0] == 200:  # this blocks the event loop
            assert time.monotonic() < deadline
        assert answer[0] == 503
        assert "the event loop has not turned for" in answer[1]
        await until(f"{url}/healthz", lambda status, _: status == 200)
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(get, f"{url}/healthz")


@pytest.mark.nats
async def test_a_bus_that_is_away_makes_a_process_unready_but_not_unhealthy(server: NatsServer):
    state = ProcessState("actors", "mine")
    state.wait_for("its engine to start")
    health, url = serving(free_port("127.0.0.1"), state)
    stop, waits = asyncio.Event(), ["its engine to start"]
    async with health, Bus.connect(BusConfig(url=server.url), "mine", name="actors", state=state) as bus:
        reporting = asyncio.create_task(
            report_status(
                bus,
                source="me",
                role="actor",
                look=lambda: Activity("generating", {"running": 2}),
                stop=stop,
                waits_for=lambda: waits[-1],
            )
        )
        await until(f"{url}/readyz", lambda status, text: (status, "engine to start" in text) == (503, True))
        waits.append("")
        assert await until(f"{url}/readyz", lambda status, _: status == 200) == "ready: generating\n"
        await server.kill()
        said = await until(f"{url}/readyz", lambda status, _: status == 503)
        assert said == "not ready: the bus is away\n"
        assert get(f"{url}/healthz")[0] == 200
        found = numbers(get(f"{url}/metrics")[1])
        assert (found["sluice_bus_connected", ""], found["sluice_ready", ""]) == (0, 0)
        await server.start()
        await until(f"{url}/readyz", lambda status, _: status == 200)
        found = numbers(get(f"{url}/metrics")[1])
        assert found["sluice_bus_reconnections_total", ""] == 1
        assert found["sluice_bus_messages_sent_total", ""] > 0
        assert (found["sluice_actors_running", ""], found["sluice_ready", ""]) == (2, 1)
        stop.set()
        await reporting


async def test_metrics_have_units_kinds_and_labels():
    state = ProcessState("storage", 'mine "1"')
    state.values = {
        "issued": 7, "reasons": {"stale": 2, "set_aside": 1}, "stored_bytes": 10, "shards_silent": [1],
        "stage": "rl", "rate_per_s": 2.5, "lost": None,
    }  # fmt: skip
    state.metrics = {"engine/busy_s": 1.5, "train/skipped": True}
    server, url = serving(free_port("127.0.0.1"), state)
    async with server:
        text = await until(f"{url}/metrics", lambda status, _: status == 200)
        assert (await asyncio.to_thread(get, f"{url}/other"))[0] == 404
    found = numbers(text)
    assert found["sluice_storage_leases_issued_total", ""] == 7
    assert found["sluice_storage_rejected_groups_total", "stale"] == 2
    assert found["sluice_storage_retained_bytes", ""] == 10
    assert found["sluice_storage_shards_silent", ""] == 1
    assert found["sluice_storage_engine_busy_seconds_total", ""] == 1.5
    assert found["sluice_storage_rate_per_second", ""] == 2.5
    assert found["sluice_storage_train_skipped", ""] == 1
    assert found["process_resident_memory_bytes", ""] > 1 << 20
    assert found["process_open_fds", ""] > 3
    assert found["process_cpu_seconds_total", ""] > 0
    assert not {name for name, _ in found if "stage" in name or "lost" in name}
    families = list(text_string_to_metric_families(text))
    assert all(s.labels["run"] == 'mine "1"' for family in families for s in family.samples)
    assert {family.name: family.type for family in families}["sluice_storage_leases_issued"] == "counter"


async def test_a_taken_port_is_refused_by_the_name_of_its_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"monitoring\.port={port}: cannot listen at 127.0.0.1:{port}"):
            async with monitored(MonitoringConfig(port=port), ProcessState()):
                pass
