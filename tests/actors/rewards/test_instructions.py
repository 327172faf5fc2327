"""Instructions that a program verifies: each with answers that follow it and answers that do not."""

import pytest

from actors.rewards.base import RewardError
from actors.rewards.instructions.ifbench_form import FORM_CHECKS
from actors.rewards.instructions.ifbench_words import WORD_CHECKS
from actors.rewards.instructions.reward import CHECKS, instructions
from actors.rewards.instructions.words import count_sentences
from tests.actors.rewards.answers import answer

CASES = [
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["THE BIG one", "A I"], ["THE big one", ""]),
    ("change_case:english_capital", {}, ["ALL OF IT, 7."], ["ALL of it", "123"]),
    ("change_case:english_lowercase", {}, ["all of it, 7."], ["All of it"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "What is 1+1?"},
     ["what is 1+1? Two."], ["Two. What is 1+1?"]),
    ("combination:two_responses", {}, ["one\n******\ntwo", "******one******two******"],
     ["one", "one******one", "one******two******three", "one****** ******two"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[name] at [address]", "[a][b][c]"], ["[name]", "[] []"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["Hello\nP.S. bye", "hello\n p. s. bye"], ["Hello", "Hello P.S. bye"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["Maybe.", "my answer is yes"]),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```', " 7 "],
     ["{'a': 1}", '{"a": 1} so', "[" * 100_000]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1\na\nSection 2\nb"], ["Section 1\na", "Subsection 1 Subsection 2"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* one\n* two", "- one\ntext\n  - two", "* **bold** one\n+ two"],
     ["* one", "* one\n* two\n* three", "**bold** line\n---\n* one"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*one* and **two**"], ["*one*", "** ** and * *"]),
    ("detectable_format:title", {}, ["<<Joy>>\ntext"], ["<Joy>", "<<>>", "<< >>"]),
    ("keywords:existence", {"keywords": ["red fox", "sea"]},
     ["The Red Fox by the sea."], ["The red fox in the season"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["category"], ["a Cat."]),
    ("keywords:frequency", {"keyword": "la", "frequency": 3, "relation": "less than"},
     ["la la lala"], ["la, la; LA"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
     ["Eel see"], ["an eel"]),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
     ["One.\n\n\"Then, two."], ["One.\n\nThe two.", "One.\n\nThen.\n\nThree.", "Then"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["one\n***\ntwo", "***\none\n***\ntwo\n***"], ["one", "one\n***\n***\ntwo", "a***b***c"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"},
     ["One. Two!", "Is it? It is"], ["One, two.", "Dr. No came."]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"},
     ["it's well-known", "one two"], ["one two three"]),
    ("punctuation:no_comma", {}, ["no comma. none"], ["a, b"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. the END.  ", '"It is the end."'],
     ["The end. So"]),
    ("startend:quotation", {}, [' "all of it" '], ['"a" b', '"']),
]  # fmt: skip


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
