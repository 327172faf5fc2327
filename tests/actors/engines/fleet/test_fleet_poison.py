"""A request that its engines fail of is given up; those that were beside it end as if it were not there."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.base import GenerationRequest, InterruptedGenerationError, Sampling
from actors.engines.fleet.fleet import Fleet
from actors.settings.fleet import FleetConfig
from bus.errors import EngineError
from tests.actors.paced_engine import VOCAB, PacedEngine, chain
from tests.actors.virtual_time import run_virtually

POISON = VOCAB + 2
"""A token that no engine draws."""


class MortalEngine(PacedEngine):
    """Dies of a request that begins with POISON as soon as that is as long as its second token says."""

    async def _pause(self, run):
        await super()._pause(run)
        first, limit, *_ = [*run.request.token_ids, 0, 0]
        if first == POISON and len(run.request.token_ids) + len(run.tokens) >= limit:
            self.crash("segmentation fault")
            left = run.generation("abort", routed=False)
            raise InterruptedGenerationError("segmentation fault", left)


async def live_through(seed, *, innocents, poisons, engines, per_engine, attempts):
    random, built = Random(seed), []

    async def build():
        engine = MortalEngine(token_s=random.choice([0.3, 1.0]), keeps=random.random() < 0.5)
        built.append(engine)
        return engine

    config = FleetConfig(
        requests_per_engine=per_engine, attempts=attempts, restarts=1000, backoff_s=0.5, backoff_max_s=0.5
    )
    fleet = Fleet({f"e{n}": build for n in range(engines)}, config)
    await fleet.start()
    await fleet.load_weights({"a": 0}, 0)
    asked = []
    for number in random.sample(range(innocents + poisons), innocents + poisons):
        poison = number >= innocents
        prompt = [POISON, random.choice([3, 8, 20])] if poison else [random.randint(1, 9)] * 2
        new = 40 if poison else random.randint(1, 40)
        request = GenerationRequest(f"r{number}", prompt, Sampling(max_new_tokens=new))
        asked.append((poison, request, asyncio.create_task(fleet.generate(request))))
        await asyncio.sleep(random.choice([0, 0, 0, 3]))
    await asyncio.wait([task for _, _, task in asked])
    for poison, request, task in asked:
        if poison:
            with pytest.raises(EngineError, match="with no other request there: it is what they fail of"):
                task.result()
        else:
            found = task.result()
            new = request.sampling.max_new_tokens
            assert (found.finish_reason, found.token_ids.tolist()) == (
                "length",
                chain(request.token_ids, new),
            )
    await asyncio.sleep(5)
    assert len(built) - engines <= poisons * max(attempts, 2)
    assert all(state["state"] == "serving" for state in fleet.engines.values())
    assert (fleet.running, fleet.waiting) == (0, 0)
    await fleet.close()


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 32),
    innocents=st.integers(1, 40),
    poisons=st.integers(0, 2),
    engines=st.integers(1, 3),
    per_engine=st.sampled_from([1, 2, 5, 16, 64]),
    attempts=st.integers(1, 6),
)
def test_innocents_finish_and_a_poison_is_given_up_within_its_attempts(seed, **world):
    run_virtually(live_through(seed, **world))


def test_the_poison_of_a_full_engine_is_given_up_within_the_restarts_of_the_defaults():
    config = FleetConfig()
    assert [config.requests_after(failures) for failures in range(6)] == [256, 256, 40, 6, 1, 1]
    assert config.attempts <= config.restarts
    world = {"innocents": 300, "poisons": 1, "engines": 1, "per_engine": 256, "attempts": config.attempts}
    run_virtually(live_through(1, **world))


@pytest.mark.parametrize("attempts", [1, 2, 3, 9])
@pytest.mark.parametrize("places", [1, 2, 256])
def test_whoever_may_be_given_up_next_is_alone(attempts, places):
    config = FleetConfig(attempts=attempts, requests_per_engine=places)
    companies = [config.requests_after(failures) for failures in range(attempts + 2)]
    assert companies == sorted(companies, reverse=True)
    assert companies[0] == places
    assert set(companies[max(1, attempts - 1) :]) == {1}
