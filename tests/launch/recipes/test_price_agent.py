"""The program of the recipe `agent` with the openai package as it is, and an engine that follows a script."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import built_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from launch.recipes.agent import prompts
from launch.recipes.recipe import recipe
from launch.settings.run_config import resolve
from tests.actors.gateway.served import TOKENIZER, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def answered(prompt: str) -> str:
    """Look all things of the last question up, and answer with the sum of the prices that were told."""
    asked = prompt.rpartition("user What do")[2]
    things = re.findall(r"the (\w+)", asked.partition("<|im_end|>")[0])
    told = re.findall(r"(\w+): (\d+)", asked.rpartition("user ")[2])
    left = things[len(told) :]
    return f"LOOKUP {left[0]}" if left else f"It is {sum(int(price) for _, price in told)}."


@pytest.fixture
async def environment() -> AsyncIterator[Environment]:
    async with built_environment(resolve(recipe("agent").settings).actors, asyncio.Event(), ()) as built:
        yield built


@pytest.mark.parametrize(("answering", "turns"), [(answered, (2, 3)), (lambda _: "It is 7.", (1,))])
async def test_the_actor_pays_what_the_program_was_told(environment: Environment, answering, turns):
    rows = [row for row in prompts()["heldout"] if row["label"] != "7"][:8]
    assert {len(row["prompt"].split()) for row in rows} == {5, 9}  # one thing, and two
    policy = Policy(ScriptedEngine(script(answering)), TOKENIZER, Sampling(max_new_tokens=24))
    for number, row in enumerate(rows):
        task = Task(task_id=f"g{number:08}.0", **row)
        episode = await environment.run(task, policy)
        [trajectory] = episode.trajectories
        assert len(trajectory.turns) in turns
        assert trajectory.reward == float(answering is answered)
