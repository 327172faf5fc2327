import asyncio

import pytest

from actors.engines.served_adapters import ServedAdapters
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, WeightsKeptError
from bus.messages import AdaptedBase
from bus.streams.blob_store import delete_blob
from tests.actors.weights.publications import publish

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
TIMEOUT_S = 60


@pytest.fixture
async def following(bus):
    """A follower at work, and its engine."""
    engine = ScriptedEngine(lambda tokens: [1], policy_version=-1)
    await engine.start()
    follower, stop = PolicyFollower(bus, engine), asyncio.Event()
    running = asyncio.create_task(follower.run(stop))
    yield follower, engine
    stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        await running
    await engine.close()


async def test_engine_takes_each_version_that_is_announced(bus, following):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        for version in (0, 1, 2):
            await publish(bus, version)
            await follower.at_least(version)
            assert engine.policy_version == version


async def test_a_version_published_before_the_start_is_found_without_a_notice(bus, following):
    follower, engine = following
    manifest = await publish(bus, 3, announce=False)
    await bus.put("policy", manifest)
    async with asyncio.timeout(TIMEOUT_S):
        await follower.at_least(3)
    assert engine.policy_version == 3


async def reads_of_keys(bus):
    """The requests for a key that are sent from now on."""
    found: list[str] = []

    async def hear(raw):
        found.append(raw.subject)

    await bus.client.subscribe(f"$JS.API.STREAM.MSG.GET.KV_{bus.topology.bucket}", cb=hear)
    await bus.client.flush()
    return found


async def test_followers_of_a_large_run_do_not_read_the_key_after_a_notice(bus):
    bus.slower = 1000.0
    reads = await reads_of_keys(bus)
    engine, stop = ScriptedEngine(lambda tokens: [1], policy_version=-1), asyncio.Event()
    follower = PolicyFollower(bus, engine)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run(stop))
        while not reads:  # noqa: ASYNC110 - the callback has no event
            await asyncio.sleep(0.01)
        for version in (0, 1, 2):
            await publish(bus, version)
            while engine.policy_version < version:  # noqa: ASYNC110 - the engine has no event
                await asyncio.sleep(0.01)
        assert len(reads) == 1
        stop.set()


async def test_a_version_that_a_lease_needs_is_looked_for_though_its_notice_was_lost(bus):
    bus.slower = 1000.0
    reads = await reads_of_keys(bus)
    engine, stop = ScriptedEngine(lambda tokens: [1], policy_version=-1), asyncio.Event()
    follower = PolicyFollower(bus, engine)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run(stop))
        while not reads:  # noqa: ASYNC110 - the callback has no event
            await asyncio.sleep(0.01)
        await bus.put("policy", await publish(bus, 3, announce=False))
        await follower.at_least(3)
        assert engine.policy_version == 3
        stop.set()


async def test_a_version_that_left_the_bus_is_skipped_for_the_next(bus, following):
    follower, engine = following
    gone = await publish(bus, 0, announce=False)
    await delete_blob(bus, gone.snapshot)
    await bus.put("policy", gone)
    await publish(bus, 1)
    async with asyncio.timeout(TIMEOUT_S):
        await follower.at_least(1)
    assert engine.policy_version == 1


async def test_a_resumed_learners_older_version_replaces_the_dead_ones(bus, following):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        await publish(bus, 9, incarnation="dead")
        await follower.at_least(9)
        await publish(bus, 5, incarnation="resumed")
        while engine.policy_version != 5:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
    assert follower.latest.incarnation == "resumed"


async def test_a_dead_learners_version_is_waited_for_until_its_successor_reaches_it(bus, following):
    """Else older weights than the bound allows would sample its lease: a soak found staleness 5 of 2."""
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        await publish(bus, 5, incarnation="resumed")
        await follower.at_least(5)
        waiting = asyncio.create_task(follower.at_least(6))
        await publish(bus, 6, incarnation="resumed")
        await waiting
    assert engine.policy_version == 6


async def test_a_dead_learners_later_version_is_none_of_its_successors(bus, following):
    follower, engine = following
    async with asyncio.timeout(TIMEOUT_S):
        await publish(bus, 9, incarnation="dead")
        await follower.at_least(9, of="dead")
        waiting = asyncio.create_task(follower.at_least(5, of="resumed"))
        await publish(bus, 5, incarnation="resumed")
        await waiting
        assert engine.policy_version == 5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await follower.at_least(5, of="dead")


async def test_stage_is_the_learners(bus, following):
    follower, _ = following
    await publish(bus, 0, stage="warmup")
    async with asyncio.timeout(TIMEOUT_S):
        await follower.at_least(0)
    assert follower.stage == "warmup"


class Choosy(ScriptedEngine):
    """Cannot have one version."""

    async def load_weights(self, state, policy_version):
        if policy_version == 1:
            raise WeightsKeptError("adapters of rank 8, and the server was started for rank 4")
        return await super().load_weights(state, policy_version)


async def refused(follower):
    async with asyncio.timeout(TIMEOUT_S):
        while not follower.refusal:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    return follower.refusal


async def test_a_version_that_the_engine_cannot_have_is_said_and_the_next_is_taken(bus):
    engine, stop = Choosy(lambda tokens: [1], policy_version=-1), asyncio.Event()
    follower = PolicyFollower(bus, engine)
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run(stop))
        await publish(bus, 0)
        await follower.at_least(0)
        await publish(bus, 1)
        assert await refused(follower) == (
            "version 1 is refused: adapters of rank 8, and the server was started for rank 4"
        )
        assert engine.policy_version == 0
        await publish(bus, 2)
        await follower.at_least(2)
        assert follower.refusal == ""
        stop.set()


async def test_other_adapters_than_servers_of_several_policies_were_started_for_end_no_actor(bus):
    """The same of an engine that is the policy's alone ends the actor, which the supervisor starts again."""
    own = ServedAdapters(rank=4, scale=1.0, modules=("q_proj",), versions=2)
    rank_8 = AdaptedBase(weights=(await publish(bus, 0, announce=False)).snapshot, scale=1.0, rank=8,
                         modules=("self_attn.q_proj",))  # fmt: skip
    await publish(bus, 1, adapted=rank_8)
    for served in (own.sharing([own], "base"), own):
        engine, stop = ScriptedEngine(lambda tokens: [1], policy_version=-1), asyncio.Event()
        follower = PolicyFollower(bus, engine, served=served)
        following = asyncio.create_task(follower.run(stop))
        if served is own:
            with pytest.raises(ExceptionGroup) as raised:
                await asyncio.wait_for(following, TIMEOUT_S)
            assert raised.group_contains(ConfigError, match="are of rank 8 and scale 1 .*start this actor")
        else:
            assert "version 1 is refused: " in await refused(follower)
            stop.set()
            await asyncio.wait_for(following, TIMEOUT_S)
