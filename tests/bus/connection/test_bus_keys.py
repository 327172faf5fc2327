"""Keys of a run on the bus: written, swapped, waited for and listed."""

import asyncio
import os
import signal
import time

import pytest
from structlog.testing import capture_logs

from bus import waiting
from bus.config import BusConfig
from bus.connection import Bus
from bus.connection.server_clock import server_clock
from bus.errors import BusAwayError, BusError
from bus.messages import RunRecord
from bus.requests import Done, Waiting
from bus.server.nats_server import NatsServer
from bus.trajectory import Trajectory
from tests.conftest import Connect
from tests.processes import suspend


@pytest.mark.nats
async def test_key_is_put_read_and_deleted(bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "GARBLED_ATTEMPTS", 2)
    record = RunRecord(name="test", config_json="{}")
    assert await bus.get("run", RunRecord) is None
    await bus.put("run", record)
    async with connect("reader") as reader:
        found = await reader.get("run", RunRecord)
        assert found is not None
        assert found[0] == record
        with pytest.raises(BusError, match="unexpected message 'run'"):
            await reader.get("run", Trajectory)
        await reader.delete("run")
    assert await bus.get("run", RunRecord) is None


@pytest.mark.nats
async def test_swap_succeeds_only_on_the_revision_that_was_read(bus: Bus):
    first = await bus.swap("k", Waiting(reason="1"), 0)
    assert first is not None
    assert await bus.swap("k", Waiting(reason="x"), 0) is None
    second = await bus.swap("k", Waiting(reason="2"), first)
    assert second is not None
    assert await bus.swap("k", Waiting(reason="x"), first) is None
    assert await bus.get("k", Waiting) == (Waiting(reason="2"), second)
    await bus.delete("k")
    assert await bus.swap("k", Waiting(reason="x"), second) is None
    assert await bus.swap("k", Waiting(reason="3"), 0) is not None


@pytest.mark.nats
async def test_a_key_tells_when_the_server_stored_it_last(bus: Bus):
    clock = await server_clock(bus, 5.0)
    assert clock is not None
    assert abs(clock.ahead_s) <= clock.uncertain_s + 0.01, "both are on this host"
    before_s = time.time()
    revision = await bus.swap("k", Waiting(reason="1"), 0)
    found = await bus.get_written("k", Waiting)
    assert found is not None
    assert found[0] == Waiting(reason="1")
    assert before_s - 0.01 <= found[1] <= time.time() + 0.01
    await bus.swap("k", Waiting(reason="1"), revision or 0)
    again = await bus.get_written("k", Waiting)
    assert again is not None
    assert again[1] > found[1]
    await bus.delete("k")
    assert await bus.get_written("k", Waiting) is None


@pytest.mark.nats
async def test_one_of_many_swaps_at_the_same_moment_wins(bus: Bus):
    swaps = [bus.swap("k", Waiting(reason=str(n)), 0) for n in range(20)]
    assert sum(revision is not None for revision in await asyncio.gather(*swaps)) == 1


@pytest.mark.nats
async def test_waiting_for_a_key_ends_with_its_message_or_a_hint(bus: Bus):
    with pytest.raises(BusAwayError, match=r"run 'test': waited 0\.1 s for 'run': start `launch storage`"):
        await bus.wait_for("run", RunRecord, timeout_s=0.1, hint="start `launch storage`")
    waiting = asyncio.create_task(bus.wait_for("run", RunRecord, timeout_s=20, hint=""))
    await asyncio.sleep(0)
    await bus.put("run", RunRecord(name="test", config_json="{}"))
    assert (await waiting).name == "test"


@pytest.mark.nats
async def test_waiting_for_a_key_asks_again_when_nobody_answers(bus: Bus, server: NatsServer, monkeypatch):
    """Nobody answers while a stream has no leader."""
    await bus.put("run", RunRecord(name="test", config_json="{}"))
    monkeypatch.setattr(bus.js, "_timeout", 0.2)
    get, failed = bus._get, []

    async def noted(key, expected):
        try:
            return await get(key, expected)
        except BusError as error:
            failed.append(str(error))
            if len(failed) == 2:
                os.kill(server.pid, signal.SIGCONT)
            raise

    monkeypatch.setattr(bus, "_get", noted)
    await suspend(server.pid)
    with pytest.raises(BusError, match=r"cannot read 'run' from the bus: .*timeout"):
        await bus.wait_for("run", RunRecord, timeout_s=0.0, hint="")
    assert len(failed) == 1
    record = await bus.wait_for("run", RunRecord, timeout_s=30, hint="")
    assert record.name == "test"
    assert len(failed) >= 2


@pytest.mark.nats
async def test_run_without_keys_reads_as_absent_and_cannot_be_written(bus_server: NatsServer):
    async with Bus.connect(BusConfig(url=bus_server.url), "nobody", name="t") as bus:
        assert await bus.get("run", RunRecord) is None
        for write in (bus.put("run", Done()), bus.swap("run", Done(), 0), bus.delete("run")):
            with pytest.raises(BusError, match="'run'"):
                await write


@pytest.mark.nats
async def test_keys_wait_for_a_bus_that_is_away_and_nothing_is_sent_meanwhile(server: NatsServer, bus: Bus):
    await bus.put("k", Done())
    await server.kill()
    async with asyncio.timeout(60):
        while bus.client.is_connected:  # noqa: ASYNC110  # the connection is noticed to be broken
            await asyncio.sleep(0.01)
    with capture_logs() as logs:
        asked = [bus.get("k", Done), bus.put("k", Done()), bus.keys("role"), bus.delete("other")]
        tasks = [asyncio.create_task(ask) for ask in asked]
        await bus.notify("test.news", Done())
        async with asyncio.timeout(60):
            while sum("what" in log for log in logs) < len(tasks):  # noqa: ASYNC110  # each says what it waits for
                await asyncio.sleep(0.01)
        assert bus.client.pending_data_size == 0
        assert not any(task.done() for task in tasks)
    assert {log.get("what") for log in logs} >= {"reading 'k'", "writing 'k'", "listing the keys 'role'"}
    await server.start()
    async with asyncio.timeout(60):
        found, *_ = await asyncio.gather(*tasks)
    assert found is not None
    assert found[0] == Done()


@pytest.mark.nats
async def test_keys_are_listed_by_their_first_part(bus: Bus):
    assert await bus.keys("role") == []
    record = RunRecord(name="test", config_json="{}")
    for key in ("role.two", "role.one.a", "roles.three", "another.role.four"):
        await bus.put(key, record)
    assert await bus.keys("role") == ["role.one.a", "role.two"]
    await bus.delete("role.two")
    assert await bus.get("role.two", RunRecord) is None, "though it may be listed"
    assert "role.one.a" in await bus.keys("role")


@pytest.mark.nats
async def test_looks_at_the_keys_leave_no_consumer_behind(bus: Bus):
    await bus.put("role.one", Done())
    for _ in range(50):
        assert await bus.keys("role") == ["role.one"]
    bucket = await bus.js.stream_info(f"KV_{bus.topology.bucket}")
    assert bucket.state.consumer_count == 0


@pytest.mark.nats
async def test_keys_of_a_run_that_has_none_cannot_be_listed(bus_server: NatsServer):
    async with Bus.connect(BusConfig(url=bus_server.url), "nobody", name="t") as bus:
        with pytest.raises(BusError, match="cannot list the keys 'role'"):
            await bus.keys("role")
