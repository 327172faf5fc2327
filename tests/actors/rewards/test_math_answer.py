"""Mathematical answers: equal as expressions, compared in processes that are killed when they hang."""

import asyncio
import time

import pytest

from actors.rewards.base import RewardError
from actors.rewards.builtin.math_answer import quickly_equal
from actors.rewards.builtin.math_equality import equal
from actors.rewards.scoring.scorers import Scorer
from actors.settings.rewards import RewardConfig
from tests.actors.rewards.answers import answer


@pytest.fixture
async def score():
    """Score boxed answers; the processes end with the test."""
    scorers = []

    async def scored(text, label, *, name="math", **settings):
        if not scorers:
            scorers.append(Scorer.from_config(name, RewardConfig(reward=name, math_processes=1, **settings)))
        return await scorers[0].score(answer(text, label))

    yield scored
    for scorer in scorers:
        await scorer.close()


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        ("42", " $42$ ", True),
        ("+42", "042", True),
        ("42", "-42", False),
        ("-0", "0", True),
        ("1" * 5000, "1" * 4999, False),
        (r"\frac12", "0.5", None),
        ("42", "x", None),
    ],
)
def test_text_tells_where_it_can(wanted, found, same):
    assert quickly_equal(wanted, found) is same


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        (r"so \boxed{42}", r"\boxed{42}", 1.0),
        (r"\boxed{41}, no: \boxed{42}", "42", 1.0),
        (r"\boxed{42}, no: \boxed{41}", "42", 0.0),
        ("it is 42", "42", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"\boxed{" + "1+" * 2000 + "1}", "2001", 0.0),
    ],
)
async def test_the_last_box_counts(score, text, label, reward):
    assert await score(text, label) == reward


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{2}{4}", r"\frac12", True),
        ("x^2 + 1", "1+x^2", True),
        ("(1, 2)", "(1,2)", True),
        ("(1, 2)", "(2,1)", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("3", r"\pi", False),
        ("what", "7", False),
        ("", "7", False),
    ],
)
def test_expressions_are_equal_whatever_their_form(found, wanted, same):
    assert equal(wanted, found) is same


@pytest.mark.parametrize("label", [None, "", r"\boxed{}"])
async def test_a_task_without_a_label_is_an_error(score, label):
    with pytest.raises(RewardError, match="label"):
        await score(r"\boxed{1}", label)


@pytest.mark.slow
async def test_expressions_are_compared_in_processes_which_are_killed_when_they_hang(score):
    """Python computes a power of whole numbers in one call, which no signal interrupts."""
    cases = {r"\boxed{0.5}": 1.0, r"\boxed{\frac{2}{4}}": 1.0, r"\boxed{0.6}": 0.0, "0.5": 0.0}
    found = await asyncio.gather(*(score(text, r"\frac12", math_timeout_s=2.0) for text in cases))
    assert dict(zip(cases, found, strict=True)) == cases
    began = time.monotonic()
    assert await score(r"\boxed{9^{9^{9^9}}}", "1") == 0.0  # a policy would learn to write what is left out
    assert time.monotonic() - began < 60
    assert await score(r"\boxed{0.5}", r"\frac12") == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"<think>\boxed{1}</think> so \boxed{42}", 1.0),
        (r"<think>\boxed{42}</think> so \boxed{1}", 0.0),
        (r"### Response \boxed{42}", 0.0),
        (r"###Response \boxed{42}", 1.0),
        (r"\boxed{42}", 0.0),
    ],
)
async def test_deepscaler_grades_what_follows_the_reasoning(score, text, reward):
    assert await score(text, "42", name="deepscaler") == reward
