"""Tests of prompts as data sets write them, and what is refused."""

import json

import pytest

from actors.environments.prompt_choices import refuse_unknown_choices
from actors.rewards.code.given_tests import BadTestsError, CallTest, InputTest, read_tests
from actors.rewards.code.reward import program_in, same_output
from actors.settings.actors import ActorsConfig
from bus.errors import ConfigError
from bus.messages import Prompt

BLOCK = "```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"inputs": ["1"], "outputs": ["2"]}, (InputTest("1", "2"),)),
        ([{"input": "1", "output": "2"}], (InputTest("1", "2"),)),
        ({"inputs": [["1", "2"]], "outputs": [["3"]], "fn_name": None}, (InputTest("1\n2", "3"),)),
    ],
)
def test_inputs_and_outputs_are_read(given, found):
    assert read_tests({"tests": given}, "else") == read_tests({}, json.dumps(given))
    assert read_tests({"tests": given}, None).inputs == found


def test_functions_are_named_by_the_test_or_by_the_prompt():
    test = {"input": '"a"\n[1]\n', "output": "2", "testtype": "functional"}
    wanted = (CallTest("f", ["a", [1]], [2]),)
    assert read_tests({"tests": [{**test, "fn_name": "f"}]}, None).calls == wanted
    assert read_tests({"tests": [test], "func_name": "f"}, None).calls == wanted
    apps = {"fn_name": "f", "inputs": [["a", [1]], [2]], "outputs": [2, [3]]}
    calls = read_tests({"tests": apps}, None).calls
    assert calls == (CallTest("f", ["a", [1]], [2]), CallTest("f", [2], [[3], 3]))


def test_statements_have_their_setup():
    mbpp = {"test_list": ["assert f()"], "test_setup_code": "x = 1", "test_imports": ["import math"]}
    found = read_tests({"tests": mbpp}, None)
    assert (found.statements, found.setup, found.entry) == (("assert f()",), "import math\nx = 1", None)
    check = "def check(candidate):\n    assert candidate()"
    found = read_tests({"tests": {"test": check, "entry_point": "f"}}, None)
    assert (found.statements, found.setup, found.entry) == (("check(candidate)",), check, "f")
    assert len(read_tests({"tests": ["assert f()", "assert g()"]}, None)) == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "it has no tests, neither as metadata.tests nor as its label: give"),
        ("print(1)", "its tests are no JSON"),
        ("3", "its tests are 3: give"),
        ([], "not one in them"),
        ({}, "its tests have the fields none"),
        ({"test_lists": []}, "its tests have the fields test_lists"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": ["1"]}, "its outputs is None: give a list"),
        ({"inputs": [1], "outputs": ["2"]}, "its inputs is 1: give a text"),
        ({"inputs": [1], "outputs": ["2"], "fn_name": "f"}, "its an input for fn_name is 1: give a list"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "a b"}, "its fn_name is 'a b': name the function"),
        ([{"input": "1"}], "its test 0 is {'input': '1'}"),
        ([{"input": "1", "output": "2", "testtype": "std"}], "the testtype of test 0 is 'std'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "its fn_name is None"),
        (
            [{"input": "x", "output": "2", "testtype": "functional", "fn_name": "f"}],
            "test 0 is no line of JSON",
        ),
        (["assert f(1) = 2"], "its test 0 is no Python"),
        (["f(1) == 2"], "its test 0 asserts nothing, so that every program would pass"),
        ({"test": "def test(c): assert c()", "entry_point": "f"}, "its test defines no function check"),
        ({"test": "def check(c): c()", "entry_point": "f"}, "its test asserts nothing"),
        ({"test": "def check(c): assert c()"}, "its entry_point is None"),
        ({"test_list": ["assert f()"], "test_setup_code": "x ="}, "its setup is no Python"),
    ],
)
def test_what_are_no_tests_is_said_in_words(given, why):
    with pytest.raises(BadTestsError) as caught:
        read_tests({"tests": given}, None)
    assert why in str(caught.value)


def test_prompts_with_wrong_tests_are_refused_before_the_run_starts():
    config = ActorsConfig.model_validate({"environment": {"type": "single_turn", "rewards": ["code"]}})
    right = Prompt(content="a", metadata={"reward": "code", "tests": ["assert f(1) == 2"]})
    plain = Prompt(content="b", label="no tests, and none needed")
    refuse_unknown_choices([right, plain], config, where="mine.jsonl")
    wrong = Prompt(content="c", metadata={"reward": "code", "tests": ["f(1) == 2"]})
    with pytest.raises(ConfigError, match=r"mine.jsonl, prompt 3: its test 0 asserts nothing"):
        refuse_unknown_choices([right, plain, wrong], config, where="mine.jsonl")
    config = ActorsConfig.model_validate({"environment": {"type": "single_turn", "reward": "code"}})
    with pytest.raises(ConfigError, match=r"mine.jsonl, prompt 2: its tests are no JSON"):
        refuse_unknown_choices([right, plain], config, where="mine.jsonl")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        (f"So:\n{BLOCK}", "print(1)"),
        (f"{BLOCK}\nOr:\n```\nprint(2)\n```\nDone.", "print(2)"),
        (f"<think>{BLOCK}</think>print(3)", "print(3)"),
        (f"{BLOCK}\n```python\nprint(4)", "print(1)"),
        ("````md\n```\nx\n```\n````", "```\nx\n```"),
        ("  ```py\n  x\n  ```", "  x"),
        ("~~~\nx = '```'\n~~~", "x = '```'"),
        ("```\nx\n````", "x"),
        ("```a``` is inline\nprint(5)", "```a``` is inline\nprint(5)"),
    ],
)
def test_the_program_is_the_last_block_after_the_reasoning(text, program):
    assert program_in(text) == program


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1  2 \n\n", " 1 2", True),
        ("1.0 2e1", "1 20", True),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("0.1", "0.10000001", False),
        ("1" * 200, "1" * 199 + "2", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_by_line_word_and_value(found, wanted, same):
    assert same_output(found, wanted) is same
