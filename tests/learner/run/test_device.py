"""Learner and actors take turns on a host's devices, over a real bus, whoever dies or comes late."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from actors.engines.fleet.colocation import DeviceSharing
from bus.config import ColocationConfig
from bus.device_messages import HOLD_KEY, DeviceHold, DeviceUser, user_key
from bus.errors import BusError
from learner.run.colocation import Device
from storage.disk.host_identity import host_identity

pytestmark = pytest.mark.nats

PATIENCE_S = 30
STEADY = ColocationConfig(enabled=True, lapse_s=60, yield_timeout_s=60)
SHORT = ColocationConfig.model_construct(enabled=True, lapse_s=0.3, yield_timeout_s=60)
"""Settings for parties that are dead from the start."""


class Engines:
    """Says when it frees the device and takes it back; freeing may take until `may_release` is set."""

    def __init__(self, journal: list[str], name: str) -> None:
        self.tokens_generated = 0
        self.may_release = asyncio.Event()
        self.may_release.set()
        self._journal = journal
        self._name = name

    async def release(self) -> None:
        await self.may_release.wait()
        self._journal.append(f"{self._name} frees")

    async def resume(self) -> None:
        self._journal.append(f"{self._name} takes")


class Room:
    def __init__(self, journal: list[str]) -> None:
        self.journal = journal

    async def make(self) -> None:
        self.journal.append("learner frees")


def device(bus, journal, config=STEADY, incarnation="first", waits=None) -> Device:
    waits = [] if waits is None else waits
    return Device(
        bus, config, incarnation=incarnation, release_memory=Room(journal).make, on_wait=waits.append
    )


@asynccontextmanager
async def actor(bus, journal, name="actor", config=STEADY):
    engines = Engines(journal, name)
    sharing = DeviceSharing(bus, engines, config, actor=name)
    async with sharing.active():
        yield sharing, engines


async def until(condition, what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110 - what others do has no event here
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {PATIENCE_S} s for {what}") from None


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


async def test_the_learner_has_the_device_when_all_engines_have_freed_it_and_gives_it_back(
    bus, connect, stop
):
    journal: list[str] = []
    async with (
        connect("other") as other,
        actor(bus, journal, "a") as (one, _),
        actor(other, journal, "b") as (two, _),
    ):
        learner = device(bus, journal)
        await learner.start()
        for _ in range(3):
            async with asyncio.timeout(PATIENCE_S), learner.held(stop) as ours:
                assert ours
                assert sorted(journal) == ["a frees", "b frees"]
                assert one.released
                assert two.released
                journal.append("learner trains")
            assert journal[2:4] == ["learner trains", "learner frees"]
            await until(lambda: not (one.released or two.released), "the actors to take the device back")
            assert sorted(journal[4:]) == ["a takes", "b takes"]
            journal.clear()


async def test_without_colocation_nobody_is_asked(bus, stop):
    journal: list[str] = []
    async with actor(bus, journal):
        learner = device(bus, journal, ColocationConfig())
        await learner.start()
        async with learner.held(stop) as ours:
            assert ours
        assert await bus.get(HOLD_KEY, DeviceHold) is None
    assert journal == []


async def test_an_actor_that_comes_while_the_learner_trains_starts_nothing_before_the_end(bus, stop):
    journal: list[str] = []
    learner = device(bus, journal)
    async with asyncio.timeout(PATIENCE_S), learner.held(stop), actor(bus, journal) as (turns, _):
        assert turns.released, "before any engine was started"
        assert journal == ["actor frees"]
    assert await bus.get(user_key("actor"), DeviceUser) is None


@pytest.mark.slow
async def test_a_hold_that_nobody_renews_is_over(bus):
    journal: list[str] = []
    dead = DeviceHold(incarnation="dead", number=7, host=host_identity(), held=True)
    await bus.put(HOLD_KEY, dead)
    async with actor(bus, journal, config=SHORT) as (turns, _):
        await until(lambda: not turns.released, "the hold of a dead learner to lapse")
        assert journal == ["actor frees", "actor takes"]
        again = replace(dead, incarnation="next", number=1)
        await bus.put(HOLD_KEY, again)
        await until(lambda: journal[2:] == ["actor frees", "actor takes"], "the next one, which dies too")


async def test_a_learner_that_follows_a_dead_one_ends_its_hold(bus, stop):
    journal: list[str] = []
    await bus.put(HOLD_KEY, DeviceHold(incarnation="dead", number=7, host=host_identity(), held=True))
    async with actor(bus, journal) as (turns, _):
        assert turns.released
        learner = device(bus, journal, incarnation="second")
        await learner.start()
        await until(lambda: not turns.released, "the hold of the dead learner to end")
        async with asyncio.timeout(PATIENCE_S), learner.held(stop):
            assert turns.released


async def test_a_hold_right_after_that_of_a_dead_learner_needs_no_turn_between(bus, stop):
    journal: list[str] = []
    await bus.put(HOLD_KEY, DeviceHold(incarnation="dead", number=7, host=host_identity(), held=True))
    learner = device(bus, journal, incarnation="second")
    async with actor(bus, journal), asyncio.timeout(PATIENCE_S), learner.held(stop):
        assert journal == ["actor frees"]


async def test_an_actor_that_died_is_not_waited_for(bus, stop):
    dead = DeviceUser(actor="dead", host=host_identity(), yielded_to="")
    await bus.put(user_key("dead"), dead)
    async with asyncio.timeout(PATIENCE_S), device(bus, [], SHORT).held(stop) as ours:
        assert ours
    assert await bus.get(user_key("dead"), DeviceUser) is None, "nor is it next time"


async def test_actors_on_other_hosts_go_on(bus, stop):
    journal: list[str] = []
    await bus.put(user_key("far"), DeviceUser(actor="far", host="another", yielded_to=""))
    async with asyncio.timeout(PATIENCE_S), device(bus, journal).held(stop) as ours:
        assert ours
    await bus.put(HOLD_KEY, DeviceHold(incarnation="far", number=1, host="another", held=True))
    async with actor(bus, journal) as (turns, _):
        assert not turns.released
    assert journal == ["learner frees"]


async def test_an_actor_that_lives_but_does_not_yield_ends_the_learner_with_its_name(bus, stop):
    impatient = STEADY.model_copy(update={"yield_timeout_s": 0.5})
    waits: list[str] = []
    journal: list[str] = []
    async with actor(bus, journal, "stubborn") as (turns, engines):
        engines.may_release.clear()
        learner = device(bus, journal, impatient, waits=waits)
        with pytest.raises(BusError, match=r"yield_timeout_s=0.5: it is still used by stubborn"):
            async with asyncio.timeout(PATIENCE_S), learner.held(stop):
                pytest.fail("it has the device")
        assert "waiting for the engines of stubborn to free the device" in waits
        engines.may_release.set()
        await until(lambda: journal == ["stubborn frees", "stubborn takes"], "the actor to go on")
        assert not turns.released


async def test_a_learner_that_is_stopped_waits_for_no_actor(bus, stop):
    journal: list[str] = []
    async with actor(bus, journal) as (_, engines):
        engines.may_release.clear()
        stop_soon = asyncio.get_running_loop().call_later(0.1, stop.set)
        async with asyncio.timeout(PATIENCE_S), device(bus, journal).held(stop) as ours:
            assert not ours
        stop_soon.cancel()
        engines.may_release.set()
    assert "learner frees" not in journal


async def test_a_step_that_fails_gives_the_device_back(bus, stop):
    journal: list[str] = []
    async with actor(bus, journal) as (turns, _):
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(PATIENCE_S), device(bus, journal).held(stop):
                1 / 0  # noqa: B018
        await until(lambda: not turns.released, "the actor to take the device back")
