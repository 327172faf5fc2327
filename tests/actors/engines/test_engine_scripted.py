"""The scripted engine behaves like a real one under swaps, aborts and failures."""

import asyncio

import numpy as np
import pytest

from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import EngineError
from tests.actors.tiny import request


def echo(prompt):
    return [*prompt, 0]


async def held(engine, *requests):
    """Start generations that stop half-way."""
    engine.hold()
    tasks = [asyncio.create_task(engine.generate(one)) for one in requests]
    await asyncio.sleep(0)  # they run up to the gate
    assert engine.running == len(requests)
    return tasks


async def test_it_answers_by_the_script():
    engine = ScriptedEngine(echo, policy_version=3)
    generation = await engine.generate(request("a", [4, 5, 6]))
    assert generation.token_ids.tolist() == [4, 5, 6, 0]
    assert (generation.finish_reason, generation.policy_versions.tolist()) == ("stop", [3] * 4)
    assert np.isfinite(generation.logprobs).all()
    assert (generation.logprobs < 0).all()
    assert (await engine.generate(request("b", [4, 5, 6], new=2))).finish_reason == "length"


async def test_a_swap_while_held_shows_in_the_versions():
    engine = ScriptedEngine(echo)
    [task] = await held(engine, request("a", [4, 5, 6]))
    await engine.load_weights({}, 1)
    engine.release()
    assert (await task).policy_versions.tolist() == [0, 0, 1, 1]


async def test_an_abort_while_held_returns_the_first_half():
    engine = ScriptedEngine(echo)
    [task] = await held(engine, request("a", [4, 5, 6]))
    await engine.abort("a")
    generation = await task
    assert (generation.finish_reason, generation.token_ids.tolist()) == ("abort", [4, 5])


async def test_a_failure_reaches_held_and_later_requests():
    engine = ScriptedEngine(echo)
    tasks = await held(engine, request("a", [4]), request("b", [5]))
    engine.fail("out of memory")
    for task in tasks:
        with pytest.raises(EngineError, match="out of memory"):
            await task
    with pytest.raises(EngineError, match="out of memory"):
        await engine.generate(request("c", [6]))
