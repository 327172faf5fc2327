"""The more actors a run has, the less often each of them speaks without need."""

import asyncio
import time

import pytest
from nats.aio.msg import Msg

from bus.codec import decode, encode
from bus.connection import Bus
from bus.connection import reporting_rate as pace_module
from bus.connection.reporting_rate import follow_pace, tell_pace
from bus.connection.status import Activity, report_status
from bus.errors import SchemaError
from bus.messages import Pace, Status
from bus.server.nats_server import NatsServer
from bus.streams.consume import Inbox
from tests.conftest import Connect
from tests.factories import make_lease


def actor_status(n: int) -> Status:
    return Status(source=f"actor-{n}", role="actor", doing="waiting", pid=n, peak_rss_bytes=1)


async def until_slower(bus: Bus, than: float) -> None:
    async with asyncio.timeout(60):
        while bus.slower <= than:  # noqa: ASYNC110 - a notice has no event
            await asyncio.sleep(0.01)


@pytest.mark.nats
async def test_actors_are_told_to_speak_less_often_when_there_are_many(
    bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pace_module, "ACTORS", 10)
    stop = asyncio.Event()
    async with connect("actor") as one:
        await follow_pace(one)
        await one.client.flush()
        telling = asyncio.create_task(tell_pace(bus, stop, count_s=0.05))
        while one.slower == 1:
            for n in range(30):
                await one.notify(one.subject("status", "actor"), actor_status(n))
            await asyncio.sleep(0.01)
        await until_slower(one, 2.4)  # half of them may have been counted first
        assert one.slower <= 3  # or nearly all: what is missing then is too little to be told
        async with connect("later") as other:
            await follow_pace(other)
            assert 2.4 < other.slower <= 3
        stop.set()
        await telling


@pytest.mark.nats
async def test_pace_of_a_run_that_became_small_is_lowered_once_all_had_time_to_speak(
    bus: Bus, connect: Connect
):
    stop = asyncio.Event()
    await bus.put(pace_module.KEY, Pace(slower=20.0))
    async with connect("actor") as one, asyncio.timeout(60):
        await follow_pace(one)
        assert one.slower == 20
        began = time.monotonic()
        telling = asyncio.create_task(tell_pace(bus, stop, count_s=0.05, lower_after_s=0.5))
        while one.slower > 1:  # noqa: ASYNC110 - a notice has no event
            await asyncio.sleep(0.01)
        assert time.monotonic() - began > 0.5
        stop.set()
        await telling


@pytest.mark.nats
async def test_small_run_is_told_nothing(bus: Bus, connect: Connect, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pace_module, "ACTORS", 10)
    told: list[Pace] = []
    stop, counted = asyncio.Event(), asyncio.Event()
    count = pace_module.ActorCount.actors

    def counting(self: pace_module.ActorCount) -> int:
        found = count(self)
        if found:
            counted.set()
        return found

    monkeypatch.setattr(pace_module.ActorCount, "actors", counting)
    async with connect("actor") as one, asyncio.timeout(60):
        await one.listen(one.subject("notice", "pace"), Pace, told.append)
        await one.client.flush()
        telling = asyncio.create_task(tell_pace(bus, stop, count_s=0.05))
        while not counted.is_set():
            for n in range(10):
                await one.notify(one.subject("status", "actor"), actor_status(n))
            await asyncio.sleep(0.01)
        stop.set()
        await telling
        await bus.client.flush()
        await one.client.flush()
        assert told == []


def test_pace_that_would_silence_an_actor_is_refused():
    for slower in (0.0, 1e9):
        with pytest.raises(SchemaError, match="slower"):
            decode(encode(Pace(slower=slower)), Pace)


@pytest.mark.nats
async def test_status_says_when_the_next_one_comes(bus: Bus):
    heard: asyncio.Queue[Status] = asyncio.Queue()
    stop = asyncio.Event()
    bus.slower = 3.0
    await bus.listen(bus.subject("status", "actor"), Status, heard.put_nowait)
    reporting = asyncio.create_task(
        report_status(bus, source="me", role="actor", look=lambda: Activity("waiting"), stop=stop)
    )
    async with asyncio.timeout(60):
        assert (await heard.get()).next_s == 1.5
        began = time.monotonic()
        await heard.get()
        assert time.monotonic() - began > 1.2  # half a second in a small run
        stop.set()
        await reporting


async def pulls(bus: Bus) -> list[str]:
    found: list[str] = []

    async def hear(raw: Msg) -> None:
        found.append(raw.subject)

    await bus.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=hear)
    return found


@pytest.mark.nats
async def test_idle_inbox_of_a_large_run_asks_once(bus: Bus):
    asked = await pulls(bus)
    bus.slower = 20.0
    inbox = Inbox(bus, "TASKS", "rollout")
    for _ in range(4):
        assert await inbox.take(1, timeout_s=1.0) == []
    await bus.client.flush()
    assert len(asked) == 1
    await bus.js.publish(bus.subject("tasks", "rollout", 1), encode(make_lease(1)))
    assert len(await inbox.take(1, timeout_s=5.0)) == 1


@pytest.mark.nats
async def test_pull_that_a_restart_of_the_server_lost_is_asked_for_again_at_once(
    server: NatsServer, bus: Bus
):
    bus.slower = 100.0  # a pull waits for five minutes
    inbox = Inbox(bus, "TASKS", "rollout")
    assert await inbox.take(1, timeout_s=0.2) == []
    await server.kill()
    await server.start()
    async with asyncio.timeout(60):
        while not (bus.client.is_connected and bus.client.stats["reconnects"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await bus.js.publish(bus.subject("tasks", "rollout", 1), encode(make_lease(1)))
        while not (taken := await inbox.take(1, timeout_s=1.0)):
            continue
    assert len(taken) == 1
