"""Weights of a fleet: engines take them a part at a time, and join and leave with the current ones."""

import asyncio

import pytest

from actors.settings.actors import ActorsConfig
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from bus.errors import ConfigError, EngineError
from tests.actors.engines.fleet.virtual_fleet import Yard, is_right, virtual


@virtual
async def test_a_crashed_engine_is_built_again_and_serves_with_the_current_weights():
    async with Yard(1, version=3) as yard:
        task = yard.ask("a", new=10)
        await asyncio.sleep(4.5)
        dead = yard.engine("e0")
        dead.crash()
        generation = await task
        is_right(generation)
        assert set(generation.policy_versions.tolist()) == {3}
        assert yard.engine("e0") is not dead
        assert yard.engine("e0").loads == [(3, 2)]
        assert yard.fleet.engines["e0"]["restarts"] == 1


@virtual
async def test_a_newcomer_gets_all_tensors_though_the_latest_update_had_one():
    async with Yard(1, version=1) as yard:
        await yard.fleet.load_weights({"b": 7}, 2)
        assert yard.engine("e0").loads == [(1, 2), (2, 1)]
        yard.engine("e0").crash()
        is_right(await yard.ask("a"))
        assert yard.engine("e0").weights == {"a": 1, "b": 7}
        assert yard.engine("e0").policy_version == 2


def test_weights_from_the_learner_are_got_ready_and_taken_before_the_fleet_gives_an_engine_up():
    ActorsConfig(engine=SglangEngineConfig(update="group"))
    engine = SglangEngineConfig(update="group", update_timeout_s=5.0)
    ActorsConfig(engine=engine, fleet=FleetConfig(update_timeout_s=100.0))
    with pytest.raises(ValueError, match=r"once to get .* more than fleet\.update_timeout_s=99: .* to 100"):
        ActorsConfig(engine=engine, fleet=FleetConfig(update_timeout_s=99.0))


@virtual
async def test_weights_reach_a_part_of_the_engines_at_a_time():
    async with Yard(4, update_s=10, updated_at_once=0.5) as yard:
        task = yard.ask("a", new=40)
        updating = asyncio.create_task(yard.fleet.load_weights({"a": 2}, 2))
        seen = []
        while not updating.done():
            seen.append((sum(engine.updating for engine in yard.all()), yard.fleet.policy_version))
            await asyncio.sleep(1)
        assert max(count for count, _ in seen) == 2
        assert seen[-1][1] == 1, "the oldest in service counts"
        assert yard.fleet.policy_version == 2
        assert await updating == 10
        assert sorted(set((await task).policy_versions.tolist())) == [1, 2]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), RuntimeError("CUDA"), ConfigError("no room for the weights")]
)
@virtual
async def test_an_engine_that_cannot_take_an_update_for_whatever_reason_is_built_again(error):
    async with Yard(2, backoff_s=1) as yard:
        failing = yard.engine("e0")

        async def refuse(state, policy_version):
            raise error

        failing.load_weights = refuse
        await yard.fleet.load_weights({"a": 2}, 2)
        is_right(await yard.ask("a"))
        assert failing.closed
        assert yard.engine("e0") is not failing
        assert [yard.engine(name).weights["a"] for name in ("e0", "e1")] == [2, 2]


@virtual
async def test_a_younger_version_supersedes_one_that_is_on_its_way():
    async with Yard(4, update_s=10, updated_at_once=0.25) as yard:
        older = asyncio.create_task(yard.fleet.load_weights({"a": 2}, 2))
        await asyncio.sleep(5)
        await yard.fleet.load_weights({"b": 3}, 3)
        await older
        assert [version for engine in yard.all() for version, _ in engine.loads].count(2) == 1
        assert all(engine.policy_version == 3 for engine in yard.all())
        assert all(engine.weights == {"a": 2, "b": 3} for engine in yard.all())


@virtual
async def test_an_engine_that_hangs_in_an_update_does_not_hold_the_others():
    async with Yard(2, updated_at_once=1, health_period_s=5, health_timeout_s=5) as yard:
        hung = yard.engine("e0")
        hung.hang()
        await yard.fleet.load_weights({"a": 2}, 2)
        assert yard.fleet.policy_version == 2
        is_right(await yard.ask("a"))
        await asyncio.sleep(30)
        assert yard.engine("e0") is not hung
        assert yard.engine("e0").policy_version == 2


@virtual
async def test_engines_join_with_the_current_weights_and_leave_without_losing_a_token():
    async with Yard(1, version=4) as yard:
        task = yard.ask("a", new=10)
        await asyncio.sleep(3.5)
        yard.fleet.join("late", yard.build("late"))
        await asyncio.sleep(1)
        assert yard.engine("late").loads == [(4, 2)]
        await yard.fleet.leave("e0")
        assert yard.engine("e0").closed
        is_right(await task)
        assert list(yard.fleet.engines) == ["late"]
        assert yard.fleet.tokens_generated == 10
        with pytest.raises(EngineError, match="already has an engine named late"):
            yard.fleet.join("late", yard.build("late"))


@virtual
async def test_a_fleet_that_everybody_left_waits_for_the_next_engine():
    async with Yard(1) as yard:
        await yard.fleet.leave("e0")
        task = yard.ask("a")
        await asyncio.sleep(100)
        assert not task.done()
        assert yard.fleet.policy_version == 1
        yard.fleet.join("new", yard.build("new"))
        is_right(await task)


@virtual
async def test_requests_wait_for_the_first_weights():
    async with Yard(2, version=-1) as yard:
        assert yard.fleet.policy_version == -1
        task = yard.ask("a")
        await asyncio.sleep(5)
        assert yard.fleet.waiting == 1
        await yard.fleet.load_weights({"a": 0}, 0)
        is_right(await task)
