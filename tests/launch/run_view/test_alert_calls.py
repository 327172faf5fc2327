"""A run that fails or is lost, and an alarm that begins, are told to a command and a URL, once each."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from bus.connection.bus import Bus
from bus.errors import ConfigError
from launch.process.run_ending import noted_ending
from launch.process.runtime import SUPERVISOR
from launch.run_view import alert_calls
from launch.run_view.alert_calls import AlertCalls
from launch.run_view.monitor import PartEnding, RunMonitor
from launch.settings.run_config import RunConfig, validate
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from tests.launch.messages import FACTS, Clock, learner
from tests.storage.serving import until


def noting(file: Path, *, status: int = 0, sleep_s: float = 0.0) -> RunConfig:
    """Settings of a run whose command adds what it is told to a file, a line each."""
    program = (
        "import pathlib, sys, time; told = sys.stdin.read(); "
        f"pathlib.Path({str(file)!r}).open('a').write(told); time.sleep({sleep_s}); "
        f"sys.exit('no route' if {status} else 0)"
    )
    command = shlex.join([sys.executable, "-c", program])
    return validate({"run": "mine", "directory": file.parent, "monitoring": {"alert_command": command}})


def by_shell(script: str) -> RunConfig:
    return validate({"monitoring": {"alert_command": shlex.join(["sh", "-c", script])}})


def told(file: Path) -> list[dict]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line]


async def test_a_failure_is_told_to_the_command_with_its_error_and_an_order_to_stop_is_not(tmp_path: Path):
    calls, run = AlertCalls(noting(tmp_path / "told")), RunDirectory(tmp_path, "mine")
    (run.path / "progress.json").write_text(json.dumps({"stage": "rl", "step": 7}))
    stopped = asyncio.Event()
    stopped.set()

    async def fail(stop: asyncio.Event) -> None:
        async with calls.failure_told(run):
            with noted_ending(run, stop):
                raise ConfigError("no such reward")

    for stop in (stopped, asyncio.Event()):
        with pytest.raises(ConfigError, match="no such reward"):
            await fail(stop)
    [event] = told(tmp_path / "told")
    write_json(run.ending, {"state": "lost"})  # as at a start, without room for how it ended
    with pytest.raises(OSError, match="no room"):
        async with calls.failure_told(run):
            raise OSError("no room")
    assert told(tmp_path / "told")[1]["reason"] == "OSError: no room"
    assert event.pop("time").endswith("+00:00")
    assert event == {"run": "mine", "state": "failed", "reason": "no such reward", "step": 7}


@asynccontextmanager
async def watching(monitor: RunMonitor, file: Path) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Tell of the monitor's run; yields what waits until it was looked at twice."""
    stop, clock = asyncio.Event(), monitor._clock
    calls = asyncio.create_task(AlertCalls(noting(file)).watch(monitor, stop))

    async def looked_twice() -> None:
        asked = clock.asked
        await until(lambda: clock.asked >= asked + 4)

    yield looked_twice
    stop.set()
    await calls


async def test_each_alarm_is_told_when_it_begins_and_a_silent_learner_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alert_calls, "LOOK_S", 0.01)
    file, clock = tmp_path / "told", Clock()
    monitor, zero = RunMonitor(FACTS, clock=clock), "each reward was 0"
    async with watching(monitor, file) as looked_twice:
        for alarms in (
            {}, {zero: f"{zero} in 3 steps"}, {zero: f"{zero} in 4 steps"},
            {zero: f"{zero} in 5 steps", "policy": "engine and learner differ"}, {},
        ):  # fmt: skip
            monitor.on_status(learner(step=20, alarms=alarms))
            await looked_twice()
        clock.now_s += 119
        await looked_twice()
        clock.now_s += 2
        await until(lambda: len(told(file)) == 3)
        await looked_twice()
    assert [(one["state"], one["reason"], one["step"]) for one in told(file)] == [
        ("alarm", "each reward was 0 in 3 steps", 20),
        ("alarm", "engine and learner differ", 20),
        ("lost", "the learner was heard 121 s ago for the last time", 20),
    ]


async def test_a_lost_learner_is_told_with_what_it_ended_by(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alert_calls, "LOOK_S", 0.01)
    file, clock = tmp_path / "told", Clock()
    monitor = RunMonitor(FACTS, clock=clock)
    async with watching(monitor, file):
        monitor.on_status(learner(step=20))
        monitor.endings = {"learner": PartEnding(7, clock.now_s, "the disk is full")}
        clock.now_s += 121
        await until(lambda: bool(told(file)))
    heard = "the learner was heard 121 s ago for the last time"
    assert told(file)[0]["reason"] == f"{heard}: ended: the disk is full; it starts again"


async def test_an_alarm_that_still_holds_after_a_restart_is_not_told_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alert_calls, "LOOK_S", 0.01)
    file, zero = tmp_path / "told", {"each reward was 0": "each reward was 0 in 3 steps"}
    for steps in (
        ((20, zero),),
        ((20, zero),),  # who tells was started again
        ((18, {}), (20, {}), (21, zero)),  # the learner as well: it needs steps to see the same again
        ((23, {}), (24, {}), (25, zero)),  # it ended, and began again
    ):
        monitor = RunMonitor(FACTS, clock=Clock())
        async with watching(monitor, file) as looked_twice:
            await asyncio.sleep(0)  # the first look, when nobody was heard yet
            for step, alarms in steps:
                monitor.on_status(learner(step=step, alarms=alarms))
                await looked_twice()
    assert [one["step"] for one in told(file)] == [20, 25]


@pytest.mark.parametrize("garbled", ["", "[1]", '{"policy": "x"}'])
async def test_a_garbled_note_of_what_was_told_ends_nothing(tmp_path: Path, monkeypatch, garbled: str):
    monkeypatch.setattr(alert_calls, "LOOK_S", 0.01)
    RunDirectory(tmp_path, "mine").alarms.write_text(garbled)
    monitor = RunMonitor(FACTS, clock=Clock())
    with capture_logs() as logged:
        async with watching(monitor, tmp_path / "told") as looked_twice:
            monitor.on_status(learner(step=20, alarms={"policy": "they differ"}))
            await looked_twice()
    assert [one["reason"] for one in told(tmp_path / "told")] == ["they differ"]
    assert "alarms.json" in next(one["file"] for one in logged if one["event"] == "alarms_not_read")


def test_alarms_that_a_full_disk_refused_are_written_when_there_is_room(tmp_path: Path):
    run = RunDirectory(tmp_path, "mine")
    write_json(run.alarms, {"mismatch": 3})
    alarms = alert_calls._HeldAlarms(run)
    assert alarms.begun({"step": 4000, "alarms": {}}) == []  # it has ended
    run.alarms.unlink()
    run.alarms.mkdir()  # nothing can be written in its place
    with capture_logs() as said:
        alarms.keep()
        alarms.keep()
    assert [line["event"] for line in said] == ["alarms_not_kept"]
    run.alarms.rmdir()
    alarms.keep()
    assert json.loads(run.alarms.read_text()) == {}


@pytest.mark.nats
async def test_alarms_of_a_learner_that_no_screen_shows_are_heard(tmp_path: Path, bus: Bus):
    stop = asyncio.Event()
    heard = asyncio.create_task(AlertCalls(noting(tmp_path / "told")).watch_learner(bus, stop))

    async def said() -> bool:
        await bus.notify(bus.subject("status", "learner"), learner(alarms={"policy": "they differ"}))
        return bool(told(tmp_path / "told"))

    await until(said, seconds=60)
    stop.set()
    await heard
    assert [one["reason"] for one in told(tmp_path / "told")] == ["they differ"]


async def test_a_url_gets_the_same_and_a_call_that_fails_is_logged(tmp_path: Path, monkeypatch):
    posted: list[dict] = []

    async def take(request: web.Request) -> web.Response:
        posted.append(await request.json())
        return web.Response(status=200 if len(posted) == 1 else 500)

    application = web.Application()
    application.router.add_post("/hook", take)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    by_url = validate({"run": "mine", "monitoring": {"alert_url": url}})
    with capture_logs() as logged:
        await AlertCalls(by_url).tell("lost", "its host went", 3)
        await AlertCalls(by_url).tell("lost", "its host went", 3)
        await runner.cleanup()
        await AlertCalls(by_url).tell("lost", "its host went", 3)
        await AlertCalls(noting(tmp_path / "a", status=1)).tell("failed", "x", 0)
        await AlertCalls(validate({"monitoring": {"alert_url": "http://..../"}})).tell("failed", "x", 0)
        await AlertCalls(by_shell("sleep 30 &")).tell("failed", "x", 0)  # succeeds, whatever it leaves
        monkeypatch.setattr(alert_calls, "LIMIT_S", 0.5)
        await asyncio.wait_for(AlertCalls(by_shell("sleep 60; true")).tell("failed", "x", 0), 30)
        await AlertCalls(noting(tmp_path / "b", sleep_s=60)).tell("failed", "x", 0)
    assert [(one["state"], one["step"]) for one in posted] == [("lost", 3)] * 2
    reasons = [one["reason"] for one in logged if one["event"] == "alert_not_delivered"]
    assert reasons[0] == "the server answered with status 500"
    assert "127.0.0.1" in reasons[1]
    assert reasons[2] == "the command ended with status 1: no route"
    assert "label empty" in reasons[3]
    assert reasons[4:] == ["the call took longer than 0.5 s"] * 2


async def test_a_process_without_its_supervisor_tells_that_the_run_is_lost(tmp_path: Path, monkeypatch):
    run, calls = RunDirectory(tmp_path, "mine"), AlertCalls(noting(tmp_path / "told"))
    monkeypatch.setenv(SUPERVISOR, str(os.getppid()))
    await calls.tell_if_orphaned(run)
    assert told(tmp_path / "told") == []
    monkeypatch.setenv(SUPERVISOR, "1")
    await calls.tell_if_orphaned(run)
    assert [one["state"] for one in told(tmp_path / "told")] == ["lost"]


def test_a_program_that_is_not_there_and_an_address_that_is_none_are_refused():
    with pytest.raises(ConfigError, match=r"monitoring\.alert_command: .*no closing quotation"):
        validate({"monitoring": {"alert_command": "echo 'x"}})
    with pytest.raises(ConfigError, match="there is no program 'curll' on this host"):
        AlertCalls(validate({"monitoring": {"alert_command": "curll -d @-"}}))
    with pytest.raises(ConfigError, match=r"monitoring\.alert_url"):
        validate({"monitoring": {"alert_url": "example.org/hook"}})
