"""Text of a policy that has degenerated holds no built-in reward up: these run on the actor's event loop."""

import time

import pytest

from actors.rewards.builtin.quick import dapo, f1, gpqa, last_number
from actors.rewards.code.reward import program_in
from actors.rewards.instructions.reward import CHECKS, instructions
from tests.actors.rewards.answers import answer
from tests.actors.rewards.ifbench_cases import CASES as IFBENCH
from tests.actors.rewards.ifbench_cases import SYLLABLES, VERBS, write_tagger
from tests.actors.rewards.instruction_cases import CASES

LENGTH = 10_000
BOUND_S = 0.25
"""Processor time for one text; what is quadratic in its length takes several times that."""
PARTS = [
    " ", "\n", "x \n", "*", "_ ", "a b. ", ".", "A ", "answer ", "the answer is ", "\\boxed{", "```\n", "<<",
    "[", "1", "'", "P.S. ", "- ", "-",
]  # fmt: skip
TEXTS = [f"{head}{part * (LENGTH // len(part))}{tail}" for part in PARTS
         for head, tail in [("The answer", "y"), ("```", "y"), ("x\n*", "")]]  # fmt: skip
ARGUMENTS = {name: arguments for name, arguments, *_ in [*CASES, *IFBENCH, SYLLABLES, VERBS]}


def took_s(call, *arguments) -> float:
    started = time.process_time()
    call(*arguments)
    return time.process_time() - started


@pytest.mark.parametrize("reward", [gpqa, dapo, f1, last_number])
def test_a_reward_is_linear_in_the_text(reward):
    times = {text[:20]: took_s(reward, answer(text, "1" if reward is not gpqa else "A")) for text in TEXTS}
    assert max(times.values()) < BOUND_S, times


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == VERBS[0] else name for name in CHECKS]
)
def test_an_instruction_is_linear_in_the_text(name, request: pytest.FixtureRequest):
    if name == VERBS[0]:
        write_tagger(request.getfixturevalue("nltk_data"), {}, {}, ["DT", "VB"])
    metadata = {"instruction_id_list": [name], "kwargs": [ARGUMENTS[name]]}
    times = {text[:20]: took_s(instructions, answer(text, None, metadata=metadata)) for text in TEXTS}
    assert max(times.values()) < BOUND_S, times


def test_the_program_of_an_answer_is_found_in_linear_time():
    fences = [fence * (20 * LENGTH // len(fence)) for fence in ("```\n````\n", "```x\n", "~~~\nx\n", "`")]
    times = {text[:20]: took_s(program_in, text) for text in [*TEXTS, *fences]}
    assert max(times.values()) < BOUND_S, times
