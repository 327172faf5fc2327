"""A role has one holder; a dead holder's is taken over; who lost it hears of it."""

import asyncio
import os
import platform
import sys
import time
from contextlib import suppress

import pytest

from bus.connection import Bus, roles
from bus.connection.roles import guarded, hold_role, pids_of
from bus.errors import ConfigError, FencedError
from bus.messages import RoleHolder
from bus.server.nats_server import NatsServer
from tests.conftest import Connect

KEY = "role.learner"


HANGS_S = 60
"""A step that takes longer than this waits for the expiry, or for something that never comes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals are frequent, and no role expires while a test runs, however slow the machine is."""
    monkeypatch.setattr(roles, "RENEW_S", 0.3)
    monkeypatch.setattr(roles, "EXPIRE_S", 600.0)


class Clock:
    """A clock in place of the module `time`, on which each look takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which a role expires, after six looks."""
    clock = Clock()
    monkeypatch.setattr(roles, "time", clock)
    monkeypatch.setattr(roles, "EXPIRE_S", 6.0)
    return clock


async def holder(bus: Bus) -> RoleHolder | None:
    found = await bus.get(KEY, RoleHolder)
    return found[0] if found else None


@pytest.mark.nats
async def test_second_holder_is_refused_and_told_who_holds_it(bus: Bus, connect: Connect):
    async with hold_role(bus, "learner", "a"), connect("second") as other:
        async with asyncio.timeout(HANGS_S):
            with pytest.raises(ConfigError, match=rf"process {os.getpid()} on {platform.node()}"):
                async with hold_role(other, "learner", "b"):
                    pytest.fail("two learners")
        async with hold_role(other, "dispatcher", "b"):
            pass  # another role is free
        me = RoleHolder(incarnation="a", host=platform.node(), pid=os.getpid(), pids_of=pids_of())
        assert await holder(bus) == me


@pytest.mark.nats
async def test_released_role_can_be_taken_at_once(bus: Bus, connect: Connect):
    async with connect("second") as other, asyncio.timeout(HANGS_S):
        for incarnation in "abc":
            async with hold_role(other if incarnation == "b" else bus, "learner", incarnation):
                found = await holder(bus)
                assert found is not None
                assert found.incarnation == incarnation
    assert await holder(bus) is None


@pytest.mark.nats
async def test_role_is_released_when_its_holder_fails(bus: Bus):
    with pytest.raises(RuntimeError, match="out of memory"):
        async with hold_role(bus, "learner", "a"):
            raise RuntimeError("out of memory")
    assert await holder(bus) is None


@pytest.mark.nats
async def test_role_of_a_silent_holder_elsewhere_is_taken_over_after_a_while(bus: Bus, clock: Clock):
    await bus.put(KEY, RoleHolder(incarnation="dead", host="elsewhere", pid=1))
    async with hold_role(bus, "learner", "b"):
        assert clock.now_s >= 1 + roles.EXPIRE_S  # more where this machine stood still meanwhile
        found = await holder(bus)
        assert found is not None
        assert found.incarnation == "b"


@pytest.mark.nats
async def test_role_of_a_process_that_ended_on_this_host_is_taken_over_at_once(bus: Bus):
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await child.wait()
    dead = RoleHolder(incarnation="dead", host=platform.node(), pid=child.pid, pids_of=pids_of())
    await bus.put(KEY, dead)
    async with asyncio.timeout(HANGS_S), hold_role(bus, "learner", "b"):
        found = await holder(bus)
        assert found is not None
        assert found.incarnation == "b"


@pytest.mark.nats
async def test_process_id_of_another_container_says_nothing(bus: Bus, clock: Clock):
    """The holder lives in a container of this host: its process id is nobody's here."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await child.wait()
    boot, namespace = pids_of().split()
    assert namespace.startswith("pid:[")
    other = RoleHolder(
        incarnation="other", host=platform.node(), pid=child.pid, pids_of=f"{boot} pid:[4026530000]"
    )
    await bus.put(KEY, other)
    async with hold_role(bus, "learner", "b"):
        assert clock.now_s >= 1 + roles.EXPIRE_S  # more where this machine stood still meanwhile


@pytest.mark.nats
async def test_one_of_two_that_want_a_dead_holders_role_gets_it(bus: Bus, connect: Connect, clock: Clock):
    await bus.put(KEY, RoleHolder(incarnation="dead", host="elsewhere", pid=1))
    async with connect("second") as other:
        done = asyncio.Event()

        async def take(by: Bus, incarnation: str) -> str:
            async with hold_role(by, "learner", incarnation):
                await done.wait()
            return incarnation

        takers = [asyncio.create_task(take(by, name)) for by, name in ((bus, "b"), (other, "c"))]
        [loser], _ = await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED, timeout=HANGS_S)
        assert isinstance(loser.exception(), ConfigError)
        done.set()
        [winner] = [taker for taker in takers if taker is not loser]
        assert await winner in ("b", "c")


@pytest.mark.nats
async def test_holder_that_was_taken_over_is_fenced_and_leaves_the_role_to_the_other(bus: Bus):
    usurper = RoleHolder(incarnation="b", host="elsewhere", pid=1)
    async with hold_role(bus, "learner", "a") as holding:
        await bus.put(KEY, usurper)
        async with asyncio.timeout(HANGS_S):
            with pytest.raises(FencedError, match="another process took over as learner of run 'test'"):
                await holding
    assert await holder(bus) == usurper


@pytest.mark.nats
async def test_renewed_role_is_kept(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    """Each of three renewals goes on from the one before it."""
    monkeypatch.setattr(roles, "RENEW_S", 0.05)
    renewed, swap = asyncio.Semaphore(0), bus.swap

    async def counted_swap(key: str, message: RoleHolder, revision: int) -> int | None:
        found = await swap(key, message, revision)
        renewed.release()
        return found

    monkeypatch.setattr(bus, "swap", counted_swap)
    async with asyncio.timeout(HANGS_S), hold_role(bus, "learner", "a") as holding:
        for _ in range(1 + 3):  # the role is taken by a swap, too
            await renewed.acquire()
        assert not holding.done()


@pytest.mark.nats
async def test_role_survives_a_restart_of_the_bus(server: NatsServer, bus: Bus, connect: Connect):
    async with hold_role(bus, "learner", "a") as holding:
        before = await bus.get(KEY, RoleHolder)
        await server.kill()
        await asyncio.wait([holding], timeout=1.0)  # several renewals fail
        await server.start()
        async with connect("second") as other:
            with pytest.raises(ConfigError, match="already has a learner"):
                async with hold_role(other, "learner", "b"):
                    pytest.fail("two learners")
        after = await bus.get(KEY, RoleHolder)
        assert before is not None
        assert after is not None
        assert after[1] > before[1]
        assert not holding.done()


@pytest.mark.nats
async def test_renewal_whose_answer_was_lost_does_not_fence_its_holder(bus: Bus):
    async with hold_role(bus, "learner", "a") as holding:
        found = await bus.get(KEY, RoleHolder)
        assert found is not None
        await bus.put(KEY, found[0])  # as if written by a renewal that never heard of its success
        await asyncio.wait([holding], timeout=0.5)
        assert not holding.done()


@pytest.mark.nats
async def test_role_is_left_quickly_when_the_bus_is_gone(server: NatsServer, bus: Bus):
    async with hold_role(bus, "learner", "a"):
        await server.kill()
        began = time.monotonic()
    assert time.monotonic() - began < 15


@pytest.mark.nats
async def test_role_is_left_though_its_renewal_misses_a_cancellation(bus: Bus, monkeypatch):
    """A renewal misses it in Python 3.11 when the answer comes at the same moment."""
    renews, swap = asyncio.Event(), bus.swap

    async def deaf_swap(key: str, message: RoleHolder, revision: int) -> int | None:
        found = await swap(key, message, revision)
        if revision > 0:
            renews.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return found

    monkeypatch.setattr(bus, "swap", deaf_swap)
    async with asyncio.timeout(HANGS_S):
        async with hold_role(bus, "learner", "a"):
            await renews.wait()
    assert await holder(bus) is None


async def test_work_of_a_lost_role_ends_though_it_misses_a_cancellation():
    """As what waits for an answer of nats-py does, when that comes at the same moment."""
    begun = asyncio.Event()

    async def works() -> None:
        with suppress(asyncio.CancelledError):
            begun.set()
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def fenced() -> None:
        await begun.wait()
        raise FencedError("another process took over")

    async with asyncio.timeout(60):
        with pytest.raises(FencedError):
            await guarded(works(), asyncio.create_task(fenced()))
