"""Instructions that a program verifies: each with answers that follow it and answers that do not."""

import pytest

from actors.rewards.base import RewardError
from actors.rewards.instructions.ifbench_form import FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS
from actors.rewards.instructions.reward import CHECKS, instructions
from actors.rewards.instructions.words import count_sentences
from tests.actors.rewards.answers import answer
from tests.actors.rewards.instruction_cases import CASES


def score(text, *given):
    names, kwargs = [name for name, _ in given], [arguments for _, arguments in given]
    return instructions(answer(text, None, metadata={"instruction_id_list": names, "kwargs": kwargs}))


@pytest.mark.parametrize(("name", "arguments", "follow", "others"), CASES, ids=[case[0] for case in CASES])
def test_instruction(name, arguments, follow, others):
    assert [score(text, (name, arguments)).reward for text in follow] == [1.0] * len(follow)
    assert [score(text, (name, arguments)).reward for text in others] == [0.0] * len(others)


def test_every_instruction_has_cases():
    assert {name for name, *_ in CASES} == CHECKS.keys() - WORD_CHECKS.keys() - FORM_CHECKS.keys()


def test_all_instructions_count_and_the_share_of_them_is_a_part():
    given = ("punctuation:no_comma", {}), ("change_case:english_lowercase", {"relation": None})
    found = score("<think>A, B</think>all of it", *given)
    assert (found.reward, found.components) == (1.0, {"followed": 1.0})
    found = score("All of it", *given)
    assert (found.reward, found.components) == (0.0, {"followed": 0.5})
    assert score("  ", *given).components == {"followed": 0.0}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two? Three!", 3),
        ("It costs 3.50 in all.", 1),
        ('He said "go." Then he left...', 2),
        ("Mr. Smith, i.e. John, went.", 1),
        ("...", 0),
    ],
)
def test_sentences_are_counted(text, number):
    assert count_sentences(text) == number


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "has no instructions to check"),
        ({"instruction_id_list": []}, "has no instructions to check"),
        ({"instruction_id_list": ["a", "b"], "kwargs": [{}]}, "one object for each of the 2"),
        ({"instruction_id_list": ["keywords:existance"]}, "did you mean 'keywords:existence'"),
        ({"instruction_id_list": ["keywords:existence"]}, "cannot be checked: .*keywords"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": "sea"}]}, "is no list of"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, "is no object"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "more than"}],
            },
            "neither 'at least' nor 'less than'",
        ),
    ],
)
def test_instructions_that_cannot_be_checked_are_errors_and_not_zeros(metadata, why):
    with pytest.raises(RewardError, match=why):
        instructions(answer("text", None, metadata=metadata))
