"""The program of the preset `agent` with the openai package as it is, and an engine that follows a script."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from launch.settings.run_config import preset, resolve
from soak.failing_environment import FAILURES, FailingEnvironment
from tests.actors.gateway.served import TOKENIZER, script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
COUNT = 60
ANSWERS = {  # of demonstrations of the panel, by how a request goes on after its question
    "": "3142",
    " drafts a 3142 b 3142": "1234",
    " which a 1234 b 1234": "b",
}
REWARDS = {"solver-1": 0.0, "solver-2": 0.0, "rewriter-1": 1.0, "rewriter-2": 1.0, "selector": 1.0}


def answered(prompt: str) -> str:
    return ANSWERS[prompt.partition("user sort 3142")[2].partition("<|im_end|>")[0]]


@pytest.fixture
async def failing() -> AsyncIterator[Environment]:
    """The preset's environment, a third of whose rollouts fail."""
    inner = resolve(preset("agent")).actors.environment
    environment = FailingEnvironment(FailingEnvironment.Settings(environment=inner, fraction=0.3))
    yield environment
    await environment.close()


@pytest.mark.nightly
async def test_agents_ask_as_in_the_demonstrations_and_fail_as_they_are_made_to(failing: Environment):
    policy = Policy(ScriptedEngine(script(answered)), TOKENIZER, Sampling(max_new_tokens=5))
    tasks = [Task(task_id=f"g00000000.{n}", prompt="sort 3142", label="1234") for n in range(COUNT)]
    outcomes = await asyncio.gather(*(failing.run(one, policy) for one in tasks), return_exceptions=True)
    episodes = [outcome for outcome in outcomes if isinstance(outcome, Episode)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, FAILURES)]
    assert len(episodes) + len(failed) == COUNT
    assert {str(error) for error in failed} == {"an injected failure"}
    assert COUNT / 3 < len(episodes) < COUNT
    for one in episodes:
        assert one.outcome == 1.0
        assert {part.agent: part.reward for part in one.trajectories} == REWARDS


def test_the_preset_is_the_panel_but_for_its_environment():
    own, panel = (preset(name) for name in ("agent", "panel"))
    for layer in (own, panel):
        del layer["run"], layer["actors"]["environment"]
    assert own == panel
