"""Real engines in one fleet: tokens outlive their engine; greedy ones are the same whoever samples them."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines.base import InterruptedGenerationError
from bus.errors import EngineError
from tests.actors.engines.embedded.halted_generation import halted_at
from tests.actors.engines.fleet.embedded_fleet import LONG, PROMPT, begun, fleet_of, uninterrupted
from tests.actors.tiny import other_model, recomputed, request


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
