"""The environments of the presets `python`, `retool` and `repair`, with a sandbox, answered as shown."""

import asyncio
from random import Random

import pytest

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.scripted_engine import ScriptedEngine
from launch.settings.run_config import preset, resolve
from learner.initial.scratch_model import character_tokenizer
from storage.built_in_tasks.generators import TASKS

TOKENIZER = character_tokenizer()
NUMBER = 123


@pytest.fixture(scope="module", params=["python", "retool", "repair"])
def prepared(request):
    """The name of a preset and its environment."""
    environment = build_environment(resolve(preset(request.param)).actors.environment)
    yield request.param, environment
    asyncio.run(environment.close())


def worked(name: str, *, wrong: bool) -> list[str]:
    """Return demonstrations with a program and their answers as texts, as the tokenizer has them."""
    task, found = TASKS[name], set()
    for seed in range(60):
        shown = task.demonstration(NUMBER, Random(seed), wrong)
        chat, turn = shown if isinstance(shown, tuple) else ([], shown)
        prompt = [{"role": "user", "content": task.problem(NUMBER)[0]}]
        text = TOKENIZER.apply_chat_template(chat or prompt, tokenize=False, add_generation_prompt=True)
        found.add(TOKENIZER.decode(TOKENIZER.encode(f"{text}{turn}<|end|>")))
    return sorted(text for text in found if "<result>" in text)


async def rolled_out(environment, name: str, text: str):
    """Roll out a policy that says what the chat has of it, and return the episode."""
    prompt, label = TASKS[name].problem(NUMBER)

    def rest(token_ids):
        seen = TOKENIZER.decode(list(token_ids))
        assert text.startswith(seen)  # what it is shown is what the demonstration showed
        return TOKENIZER.encode(text[len(seen) :].partition("<|user|>")[0])

    policy = Policy(ScriptedEngine(rest), TOKENIZER, Sampling(max_new_tokens=64))
    make = TASKS[name].metadata
    metadata = make(NUMBER) if make else {}
    return await environment.run(Task(task_id="t", prompt=prompt, label=label, metadata=metadata), policy)


async def test_right_demonstrations_are_what_the_sandbox_answers_and_are_rewarded(prepared):
    name, environment = prepared
    [text] = worked(name, wrong=False)
    episode = await rolled_out(environment, name, text)
    [trajectory] = episode.trajectories
    assert trajectory.token_ids.tolist() == TOKENIZER.encode(text)
    trained = TOKENIZER.decode(trajectory.token_ids[trajectory.loss_mask])
    assert "<result>" not in trained
    assert (trajectory.reward, trajectory.metadata["tool_calls"], len(trajectory.turns)) == (1.0, 1, 2)


async def test_demonstrations_that_guess_after_a_program_are_not_rewarded(prepared):
    name, environment = prepared
    for text in worked(name, wrong=True)[:3]:
        if any(f"{TASKS[name].problem(NUMBER)[1]}{after}" in text for after in ("<|end|>", "/ f.py")):
            continue  # it has guessed right
        [trajectory] = (await rolled_out(environment, name, text)).trajectories
        assert (trajectory.reward, trajectory.metadata["tool_calls"], trajectory.end) == (0.0, 1, "completed")
