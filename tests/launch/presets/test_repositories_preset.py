"""The preset `repositories`: a model that calls a shell and an editor mends one, and is paid for it."""

import asyncio

import pytest

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from launch.settings.run_config import preset, resolve
from storage.built_in_tasks.generators import TASKS
from storage.built_in_tasks.tiny_repositories import FAULT, REPOSITORIES
from tests.actors.policy.families import FAMILIES

pytestmark = pytest.mark.slow
QWEN = FAMILIES["qwen3"]
NUMBER = 0
RIGHT, THERE = FAULT.search(REPOSITORIES[NUMBER].code).groups()
RUN = ("shell", {"command": "python3 test_clamp.py"})


@pytest.fixture(scope="module")
def environment():
    built = build_environment(resolve(preset("repositories")).actors.environment)
    yield built
    asyncio.run(built.close())


async def rolled_out(environment, *turns):
    """Roll out a policy that makes these calls, and then answers; return its trajectory and what it read."""
    said = iter([*(QWEN.write_calls([call]) for call in turns), "The tests pass."])
    read: list[str] = []

    def script(token_ids):
        read.append(QWEN.tokenizer.decode(list(token_ids)))
        text = QWEN.tokenizer.encode(next(said), add_special_tokens=False)
        return [*text, QWEN.tokenizer.eos_token_id]

    policy = Policy(ScriptedEngine(script), QWEN.tokenizer, Sampling(max_new_tokens=500))
    task = TASKS["repositories"]
    prompt, label = task.problem(NUMBER)
    asked = Task(task_id="t", prompt=prompt, label=label, metadata=task.metadata(NUMBER))
    [trajectory] = (await environment.run(asked, policy)).trajectories
    return trajectory, read


MENDED, ONLY_AS_SHOWN = f"max(low, min(x, {RIGHT}))", f"min(x, {RIGHT})"


@pytest.mark.parametrize(("to", "reward"), [(MENDED, 1.0), (ONLY_AS_SHOWN, 0.0)])
async def test_what_passes_the_hidden_tests_is_paid(environment, to, reward):
    edit = ("edit_file", {"path": "clamp.py", "old": f"max(low, min(x, {THERE}))", "new": to})
    trajectory, read = await rolled_out(environment, RUN, edit, RUN)
    assert "AssertionError" in read[1]
    assert "AssertionError" not in read[3].removeprefix(read[2])
    assert (trajectory.reward, trajectory.end, len(trajectory.turns)) == (reward, "completed", 4)
    assert trajectory.metadata["tool_calls"] == 3
