"""The rewards that compare short answers: by words, by choice, as DAPO's whole numbers."""

import pytest

from actors.rewards.base import RewardError
from actors.rewards.builtin.quick import dapo, exact_match, f1, gpqa, normalised
from actors.rewards.final_text import last_boxed, without_reasoning
from tests.actors.rewards.answers import answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        (r"\fbox {x}", "x"),
        (r"the set \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed{cut of", None),
        (r"\boxed{1} and \boxed{cut", None),
        ("nothing", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text, content):
    assert last_boxed(text) == content


def test_the_reasoning_is_left_out_where_there_is_one():
    assert without_reasoning("<think>a</think>b</think> c") == " c"
    assert without_reasoning("a b") == "a b"


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("Eiffel Tower in Paris", "eiffel tower", 0.0),
        ("<think>London</think>Paris", "Paris.", 1.0),
        ("", "paris", 0.0),
    ],
)
def test_exact_match_but_for_case_punctuation_articles_and_spaces(text, label, score):
    assert exact_match(answer(text, label)) == score


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("the cat sat", "a cat", 2 / 3),  # cat | cat sat: precision 1/2, recall 1
        ("cat cat dog", "cat bird", 0.4),  # one cat in common: 1/3 and 1/2
        ("cat cat", "cat cat", 1.0),
        ("bird", "cat", 0.0),
        ("yes it is", "yes", 0.0),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_of_words(text, label, score):
    assert f1(answer(text, label)) == pytest.approx(score, abs=1e-15)


def test_the_best_of_several_answers_counts():
    several = {"metadata": {"answers": ["NYC", "New York"]}}
    assert exact_match(answer("new york", None, **several)) == 1.0
    assert f1(answer("new york city", "Boston", **several)) == pytest.approx(0.8)
    with pytest.raises(RewardError, match="'answers' in its metadata is 'NYC': give a list"):
        f1(answer("nyc", metadata={"answers": "NYC"}))


def test_normalised_words():
    assert normalised("  An  Apple, a\tday: the 'end' ") == "apple day end"


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("Answer: 34", "34", 1.0),
        ("answer : $\\boxed{34}$.", "34", 1.0),
        ("Answer: 12\nno, Answer: 34", "34", 1.0),
        ("Answer: 34\nAnswer: 12", "34", -1.0),
        ("Answer: x = 1,234,567", "1234567", 1.0),
        ("Answer: 1{,}234", "1234", 1.0),
        ("Answer: $34^\\circ$", "34", 1.0),
        ("**Answer:** 34 cm", "34", 1.0),
        ("Answer: -5", "-5", 1.0),
        ("Answer: 5", "-5", -1.0),
        ("Answer: 34.0", "34", -1.0),  # whole numbers are literal, as in DAPO
        ("Answer: 34", "34.0", 1.0),
        ("Answer: 123456789012345678901", "123456789012345678901", 1.0),
        ("the result is 34", "34", -1.0),
        ("Answer: 34" + "." * 300, "34", -1.0),  # beyond the last 300 characters
        ("", "34", -1.0),
    ],
)
def test_dapo(text, label, score):
    found = dapo(answer(text, label))
    assert (found.reward, found.components) == (score, {"accuracy": (score + 1) / 2})


@pytest.mark.parametrize("label", ["many", "", "1/2"])
def test_dapo_refuses_a_label_that_is_no_number(label):
    with pytest.raises(RewardError, match="is not a number"):
        dapo(answer("Answer: 1", label))


CHOICES = {"choices": ["a red fox", "blue whale", "green", "the brown bear"]}


@pytest.mark.parametrize(
    ("text", "label", "metadata", "score"),
    [
        ("The answer is (B).", "B", {}, 1.0),
        ("The answer is (B).", "C", {}, 0.0),
        ("Answer: **C**", "c", {}, 1.0),
        ("Option A looks good, but the answer is D", "D", {}, 1.0),
        ("A is correct", "A", {}, 1.0),
        (r"\boxed{B}, not option A", "B", {}, 1.0),
        (r"the answer is $\boxed{\text{B}}$", "B", {}, 1.0),
        ("<think>the answer is A</think> B", "B", {}, 1.0),
        ("The answer is a tricky one: it is C", "C", {}, 1.0),  # `a` is a word
        ("I think it's B. I am sure", "B", {}, 1.0),  # `I` is a word, and no choice of four
        ("A fox, surely", "A", CHOICES, 0.0),
        ("E", "E", CHOICES | {"valid_letters": "ABCDE"}, 1.0),
        ("it is the Blue Whale!", "blue whale", CHOICES, 1.0),
        ("blue whale or green?", "blue whale", CHOICES, 0.0),
        ("answer: B", "blue whale", CHOICES, 1.0),
        ("answer: B", None, CHOICES | {"correct_letter": "b"}, 1.0),
        ("no idea", "B", CHOICES, 0.0),
        ("", "B", {}, 0.0),
    ],
)
def test_gpqa(text, label, metadata, score):
    assert gpqa(answer(text, label, metadata=metadata)) == score


@pytest.mark.parametrize(
    ("label", "metadata", "why"),
    [
        ("Z", {}, "neither one of the letters A, B"),
        ("yellow", CHOICES, "nor one of its 4 choices"),
        ("A", {"choices": "red"}, "'choices' in its metadata is 'red'"),
        ("A", {"valid_letters": 4}, "'valid_letters' in its metadata is 4"),
    ],
)
def test_gpqa_refuses_a_task_that_has_no_right_choice(label, metadata, why):
    with pytest.raises(RewardError, match=why):
        gpqa(answer("A", label, metadata=metadata))
