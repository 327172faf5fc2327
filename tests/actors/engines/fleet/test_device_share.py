"""A fleet of real engines leaves its device to others and takes it back: no token is lost."""

import asyncio

import numpy as np
import pytest

from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import EngineError
from tests.actors.engines.embedded.halted_generation import halted_at
from tests.actors.engines.fleet.embedded_fleet import LONG, PROMPT, begun, fleet_of, uninterrupted
from tests.actors.engines.fleet.virtual_fleet import Yard, is_right, virtual
from tests.actors.tiny import other_model, recomputed, request, tiny_model

PATIENCE_S = 30


async def states(fleet, *wanted: str) -> None:
    """Return when the engines are in these states."""
    async with asyncio.timeout(PATIENCE_S):
        while [engine["state"] for engine in fleet.engines.values()] != list(wanted):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def embedded() -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0))


async def test_a_generation_goes_on_from_its_tokens_when_the_device_is_back(state, model):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        expected = await uninterrupted(fleet)
        task, _ = await begun(fleet, built, "interrupted", LONG // 2)
        late = asyncio.create_task(fleet.generate(request("late", PROMPT, new=LONG, temperature=0.0)))
        await fleet.release()
        sampled = fleet.tokens_generated
        assert [engine["state"] for engine in fleet.engines.values()] == ["released"] * 2
        assert fleet.running == 0
        caches = [engine._decoder._cache.layers[0] for [engine] in built.values()]
        assert not any(layer.is_initialized for layer in caches)
        for [engine] in built.values():
            await engine.check_health()  # its thread has gone once more through all that it could decode
        assert fleet.tokens_generated == sampled
        assert not task.done()
        await fleet.resume()
        for generation in (await task, await late):
            assert generation.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(generation.logprobs, expected.logprobs, atol=1e-5)
        assert fleet.tokens_generated == 3 * LONG, "none was sampled twice"


async def test_requests_are_not_blamed_for_the_turns_of_others(state):
    async with fleet_of("one", state=state) as (fleet, _):
        task = asyncio.create_task(fleet.generate(request("often", PROMPT, new=LONG, temperature=0.0)))
        for _ in range(8):  # more than a request may fail
            await fleet.release()
            await fleet.resume()
        assert len((await task).token_ids) == LONG


async def test_weights_that_come_meanwhile_are_served_when_the_device_is_back(state):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        task, _ = await begun(fleet, built, "versions", 40)
        await fleet.release()
        await fleet.load_weights(other_model().state_dict(), 1)
        assert [engine.policy_version for [engine] in built.values()] == [0, 0]
        await fleet.resume()
        generation = await task
    assert generation.policy_versions.tolist() == [0] * 40 + [1] * (LONG - 40)
    expected = recomputed(other_model(), PROMPT, generation)
    np.testing.assert_allclose(generation.logprobs[40:], expected[40:], atol=1e-5)


async def test_engines_that_join_or_fail_meanwhile_start_when_the_device_is_back(state):
    async with fleet_of("one", state=state) as (fleet, built):
        await fleet.release()

        async def build():
            assert not fleet.released, "the device is somebody else's"
            return embedded()

        fleet.join("two", build)
        [failing] = built["one"]
        await failing.close()
        fleet._members["one"].fail("it failed in the test")
        await states(fleet, "starting", "starting")
        assert built["one"] == [failing]
        await fleet.resume()
        await states(fleet, "serving", "serving")
        assert len((await uninterrupted(fleet)).token_ids) == LONG


async def test_a_fleet_may_start_while_others_have_the_device(state):
    from actors.engines.fleet.fleet import Fleet
    from actors.settings.fleet import FleetConfig

    async def build():
        assert not fleet.released
        return embedded()

    fleet = Fleet({"one": build}, FleetConfig())
    await fleet.release()
    starting = asyncio.create_task(fleet.start())
    await fleet.load_weights(state, 0)
    await states(fleet, "starting")
    assert not starting.done()
    assert not fleet.serves
    await fleet.resume()
    async with asyncio.timeout(PATIENCE_S):
        await starting
    assert fleet.serves
    assert fleet.policy_version == 0
    await fleet.close()


async def test_an_engine_that_does_not_free_the_device_is_closed_and_replaced(state, monkeypatch):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        task, place = await begun(fleet, built, "moved", 30)
        [stubborn] = built[place]

        async def release():
            raise EngineError("no")

        monkeypatch.setattr(stubborn, "release", release)
        await fleet.release()
        assert not stubborn._thread.is_alive(), "that frees it too"
        await fleet.resume()
        assert len((await task).token_ids) == LONG
        await states(fleet, "serving", "serving")
        assert len(built[place]) == 2


async def test_a_fleet_that_is_closed_while_others_have_the_device_ends(state):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        task, _ = await begun(fleet, built, "lost", 10)
        await fleet.release()
        await fleet.close()
        with pytest.raises(EngineError, match="closed"):
            await task


async def test_an_engine_does_not_free_a_cache_that_is_in_use(serve):
    async with serve() as engine:
        halted = halted_at(engine, 10)
        task = asyncio.create_task(engine.generate(request("busy", PROMPT, new=LONG)))
        async with asyncio.timeout(PATIENCE_S):
            await halted.wait()
        with pytest.raises(EngineError, match="1 requests are being decoded"):
            await engine.release()
        assert len((await task).token_ids) == LONG


@virtual
async def test_an_engine_that_loads_weights_ends_that_before_it_rests():
    async with Yard(1, update_s=60, drain_timeout_s=3) as yard:
        task = yard.ask("a", new=20)
        await asyncio.sleep(4.5)
        update = asyncio.create_task(yard.fleet.load_weights({"a": 2}, 2))
        await asyncio.sleep(1)
        await yard.fleet.release()
        await update
        assert [engine["state"] for engine in yard.fleet.engines.values()] == ["released"]
        await yard.fleet.resume()
        is_right(await task, new=20)
    assert len(yard.built["e0"]) == 1


@virtual
async def test_requests_are_not_blamed_for_weights_that_do_not_load():
    async with Yard(1, update_timeout_s=30, attempts=3, restarts=99) as yard:
        task = yard.ask("a", new=400)
        for version in range(2, 8):
            await asyncio.sleep(1.5)
            yard.engine("e0")._update_s = 60  # of this engine, not of the next
            await yard.fleet.load_weights({"a": version}, version)
            async with asyncio.timeout(300):
                while yard.fleet.engines["e0"]["state"] != "serving":  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        is_right(await task, new=400)
    assert len(yard.built["e0"]) == 7
