"""Real engines in one fleet: tokens outlive their engine; greedy ones are the same whoever samples them."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from actors.engines.base import InterruptedGenerationError
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.fleet import Fleet
from actors.settings.engines import EmbeddedEngineConfig
from actors.settings.fleet import FleetConfig
from bus.errors import EngineError
from tests.actors.engines.embedded.test_engine_embedded import halted_at
from tests.actors.tiny import other_model, recomputed, request, tiny_model

PROMPT = [3, 4, 5, 6, 7]
LONG = 120
QUICK = FleetConfig(engines=2, drain_timeout_s=5, close_timeout_s=20, backoff_s=0.05, health_period_s=1000)


@asynccontextmanager
async def fleet_of(*names, state):
    """A fleet of embedded engines, and all that were built for it; their own weights are nobody's."""
    built: dict[str, list[EmbeddedEngine]] = {name: [] for name in names}

    def building(name):
        async def build():
            engine = EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0))
            built[name].append(engine)
            return engine

        return build

    fleet = Fleet({name: building(name) for name in names}, QUICK)
    await fleet.start()
    try:
        await fleet.load_weights(state, 0)
        yield fleet, built
    finally:
        await fleet.close()
    assert not any(engine._thread.is_alive() for engines in built.values() for engine in engines)


@pytest.fixture
def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


async def begun(fleet, built, name, tokens, **sampling):
    """A greedy generation that has stopped after `tokens` tokens, and the place that works on it."""
    halts = {place: halted_at(engines[-1], tokens) for place, engines in built.items()}
    task = asyncio.create_task(fleet.generate(request(name, PROMPT, new=LONG, temperature=0.0, **sampling)))
    waiting = {asyncio.create_task(halt.wait()): place for place, halt in halts.items()}
    done, pending = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    [there] = done
    for other in pending:
        other.cancel()
        vars(built[waiting[other]][-1]._decoder).pop("step")  # it need not stop any more
    return task, waiting[there]


async def uninterrupted(fleet):
    return await fleet.generate(request("whole", PROMPT, new=LONG, temperature=0.0))


async def test_a_greedy_generation_is_the_same_though_its_engine_was_closed_half_way(state, model):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        expected = await uninterrupted(fleet)
        task, place = await begun(fleet, built, "broken", LONG // 2)
        [dying] = built[place]
        await dying.close()
        generation = await task
        assert generation.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(generation.logprobs, expected.logprobs, atol=1e-5)
        assert set(generation.policy_versions.tolist()) == {0}
        assert fleet.tokens_generated == 2 * LONG, "none was sampled twice"
        async with asyncio.timeout(60):
            while fleet.engines[place]["state"] != "serving":  # noqa: ASYNC110 - a place has no event
                await asyncio.sleep(0.01)
        assert len(built[place]) == 2
        again = await uninterrupted(fleet)
        assert again.token_ids.tolist() == expected.token_ids.tolist()


async def test_an_engine_that_leaves_hands_its_generations_over(state):
    async with fleet_of("one", "two", state=state) as (fleet, built):
        expected = await uninterrupted(fleet)
        task, place = await begun(fleet, built, "handed", 50)
        await fleet.leave(place)
        generation = await task
        assert generation.token_ids.tolist() == expected.token_ids.tolist()
        assert fleet.tokens_generated == 2 * LONG
        assert list(fleet.engines) == [name for name in ("one", "two") if name != place]


async def test_weights_swap_in_mid_generation_and_then_its_engine_dies(state, model):
    """Version 0, then 1 on the same engine, then 1 on another: each token says so, and its log-prob fits."""
    async with fleet_of("one", "two", state=state) as (fleet, built):
        task, place = await begun(fleet, built, "long", 40)
        halt = halted_at(built[place][0], 80)
        await fleet.load_weights(other_model().state_dict(), 1)
        async with asyncio.timeout(60):
            await halt.wait()
        await built[place][0].close()
        generation = await task
    versions = generation.policy_versions.tolist()
    assert versions == [0] * 40 + [1] * (LONG - 40)
    np.testing.assert_allclose(
        generation.logprobs[:40], recomputed(model, PROMPT, generation)[:40], atol=1e-5
    )
    seen = [*PROMPT, *generation.token_ids[:90].tolist()]
    logits = other_model()(input_ids=torch.tensor([seen]), use_cache=False).logits[0, -1]
    assert int(generation.token_ids[90]) == int(logits.argmax()), "the other engine has the new weights"


async def test_a_closed_engine_gives_what_it_had_sampled(serve):
    async with serve() as engine:
        halted = halted_at(engine, 7)
        task = asyncio.create_task(engine.generate(request("a", PROMPT, new=LONG)))
        await halted.wait()
        await engine.close()
        with pytest.raises(InterruptedGenerationError, match="was closed") as found:
            await task
    partial = found.value.partial
    assert len(partial.token_ids) == len(partial.logprobs) == len(partial.policy_versions) == 7


async def test_health_is_known_after_the_decode_step_under_way(serve):
    async with serve() as engine:
        await engine.check_health()
    with pytest.raises(EngineError, match="was closed"):
        await engine.check_health()
