"""`launch watch`: a run is seen from another host, by the bus alone."""

import asyncio
import io
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from bus.codec import encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import BusAwayError
from bus.messages import RunRecord
from bus.server.nats_server import NatsServer
from bus.streams import stream_reader
from bus.streams.publish import Publisher
from bus.streams.stream_reader import StreamReader
from launch.run_view.monitor import RunMonitor, RunSettings, take_events
from launch.screens.watch import watch_run
from launch.settings.run_config import RunConfig
from tests.launch.messages import actor, evaluation, learner, metrics, storage
from tests.processes import suspend


def where(server: NatsServer, tmp_path: Path, **bus: float) -> RunConfig:
    return RunConfig(run="test", directory=tmp_path / "runs", bus=BusConfig(url=server.url, **bus))


@pytest.mark.nats
async def test_run_is_shown_from_the_bus_alone_until_its_learner_is_done(
    bus: Bus, server: NatsServer, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("launch.run_view.monitor.SILENT_S", 0.3)
    config = RunConfig(run="test")
    await bus.put("run", RunRecord(name="test", config_json=config.model_dump_json()))
    for subject, event in (("metrics", metrics(20, reward=0.625)), ("evaluation", evaluation(21, 0.875))):
        await Publisher(bus).publish(bus.subject("events", subject), encode(event), message_id=subject)
    screen = io.StringIO()
    console = Console(file=screen, width=400)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch_run(where(server, tmp_path), asyncio.Event(), console=console))
        while "learner: started" not in screen.getvalue():
            for status in (storage(), actor(), learner(stage="done")):
                await bus.notify(bus.subject("status", status.role), status)
            await asyncio.sleep(0.02)
        await watching
    shown = screen.getvalue()
    assert "done, step 20 of" in shown
    assert "reward 0.625" in shown
    assert "0.875" in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.nats
async def test_ctrl_c_ends_the_watching(bus: Bus, server: NatsServer, tmp_path: Path):
    await bus.put("run", RunRecord(name="test", config_json=RunConfig(run="test").model_dump_json()))
    stop = asyncio.Event()
    screen = io.StringIO()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(watch_run(where(server, tmp_path), stop, console=Console(file=screen)))
        while not screen.getvalue():  # noqa: ASYNC110  # a screen tells nobody
            await asyncio.sleep(0.01)
        stop.set()


@pytest.mark.nats
async def test_who_watches_is_told_that_the_bus_does_not_answer(
    bus: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream_reader, "ANSWER_TIMEOUT_S", 0.2)
    monitor = RunMonitor(RunSettings.of_run(RunConfig(run="test")))
    events = StreamReader(bus, "EVENTS", bus.subject("events", "*"))
    missing = StreamReader(bus, "NONE", bus.subject("events", "*"))
    for reader in (missing, events):
        await take_events(reader, monitor)
        assert monitor.bus_silent_s == 0, "a server without the stream answers, too"
    await suspend(server.pid)
    try:
        await take_events(events, monitor)
        assert monitor.bus_silent_s > 0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while monitor.bus_silent_s:
            await take_events(events, monitor)


@pytest.mark.nats
async def test_run_that_is_not_there_is_an_error(bus: Bus, bus_server: NatsServer, tmp_path: Path):
    with pytest.raises(BusAwayError, match="is `launch storage --run test` running on this bus"):
        await watch_run(where(bus_server, tmp_path, join_timeout_s=0.2), asyncio.Event())
