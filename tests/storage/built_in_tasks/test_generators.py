import json
from random import Random

import pytest

from bus.errors import ConfigError
from bus.messages import Prompt
from storage.built_in_tasks.generators import TASKS, generate_task, load_demonstrations
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys

pytestmark = pytest.mark.slow

KEYS = PromptKeys()


@pytest.fixture(scope="module", params=["sort", "addition", "product"])
def generated(request, tmp_path_factory):
    return request.param, generate_task(request.param, tmp_path_factory.mktemp(request.param), seed=1)


def final(response: str) -> str:
    return response.rpartition("=")[2]


def test_a_task_writes_the_promised_numbers_of_distinct_prompts(generated):
    name, files = generated
    prompts, heldout = load_prompts(files.prompts, KEYS), load_prompts(files.heldout, KEYS)
    assert len({p.content for p in heldout}) == len(heldout) == 256
    assert (
        len({p.content for p in prompts})
        == len(prompts)
        == {"sort": 20_000, "addition": 10**4 - 256, "product": 20_000}[name]
    )


def test_heldout_prompts_appear_in_no_training_file_and_depend_on_no_seed(generated, tmp_path):
    name, files = generated
    heldout = {p.content for p in load_prompts(files.heldout, KEYS)}
    assert heldout.isdisjoint(p.content for p in load_prompts(files.prompts, KEYS))
    demonstrations = load_demonstrations(files.demonstrations)
    assert heldout.isdisjoint(question_of(prompt.content) for prompt, _ in demonstrations)
    other = generate_task(name, tmp_path, seed=2)
    assert other.heldout.read_bytes() == files.heldout.read_bytes()
    assert other.prompts.read_bytes() != files.prompts.read_bytes()


def test_demonstrations_are_wrong_in_the_promised_share(generated):
    name, files = generated
    demonstrations = load_demonstrations(files.demonstrations)
    wrong = sum(not is_right(prompt.content, response) for prompt, response in demonstrations)
    assert len(demonstrations) == 26_000
    assert wrong / 26_000 == pytest.approx(TASKS[name].wrong_share, abs=0.015)


def is_right(content, response: str) -> bool:
    question = question_of(content)
    return response == f"<calc>{question}</calc>" or final(response) == label_of(question)


def question_of(content) -> str:
    return content if isinstance(content, str) else content[0]["content"]


def label_of(content: str) -> str:
    if content.startswith("sort "):
        return "".join(sorted(content.removeprefix("sort ")))
    if "*" in content:
        a, b = content.split("*")
        return str(int(a) * int(b))
    a, b = content.removesuffix("=").split("+")
    return f"{int(a) + int(b):03d}"


def test_labels_are_the_right_answers(generated):
    _, files = generated
    assert all(p.label == label_of(p.content) for p in load_prompts(files.prompts, KEYS))


def test_the_tasks_look_as_documented():
    sort, addition = TASKS["sort"], TASKS["addition"]
    assert sort.problem(918273) == ("sort 918273", "123789")
    assert addition.problem(4785) == ("47+85=", "132")
    assert addition.demonstration(4785, None, False) == "75012 48113 =132"
    assert addition.demonstration(4785, None, True) == "75012 48012 =122"
    assert addition.demonstration(1205, None, False) == "25007 10001 =017"
    assert addition.demonstration(1205, None, True) == "25007 10102 =027"


def test_demonstrations_of_products_are_turns_of_a_chat_with_a_calculator(tmp_path):
    product = TASKS["product"]
    assert product.problem(0) == ("1000*10", "10000")
    assert product.problem(9000 * 90 - 1) == ("9999*99", "989901")
    question = {"role": "user", "content": "1000*10"}
    told = {"role": "user", "content": "<result>10000</result>"}
    turns = [product.demonstration(0, Random(seed), False) for seed in range(20)]
    first = ([question], "<calc>1000*10</calc>")
    second = ([question, {"role": "assistant", "content": "<calc>1000*10</calc>"}, told], "10000")
    assert all(turn in (first, second) for turn in turns)
    assert first in turns
    assert second in turns
    chat, guess = product.demonstration(0, Random(0), True)
    assert chat == [question]
    assert guess.isdecimal()


def test_demonstrations_of_python_are_turns_of_a_chat_in_which_wrong_ones_guess_or_do_not_print():
    python = TASKS["python"]
    assert python.problem(0) == ("11**11%101", "86")
    assert python.problem(python.problems - 1) == ("99**99%999", str(pow(99, 99, 999)))
    question = {"role": "user", "content": "11**11%101"}

    def chats(wrong):
        turns = [python.demonstration(0, Random(seed), wrong) for seed in range(40)]
        return [([one["content"] for one in chat[1:]], turn) for chat, turn in turns if chat[0] == question]

    printing, silent = "<python>print(11**11%101)</python>", "<python>11**11%101</python>"
    right = chats(wrong=False)
    assert {turn for before, turn in right if not before} == {printing}
    assert [turn == "86" for before, turn in right if before == [printing, "<result>86</result>"]]
    assert len(right) == 40
    wrong = chats(wrong=True)
    assert len(wrong) == 40
    assert {turn for before, turn in wrong if not before and not turn.isdecimal()} == {silent}
    after = [turn for before, turn in wrong if before == [silent, "<result>[no output]</result>"]]
    guesses = [turn for before, turn in wrong if not before and turn.isdecimal()]
    assert after
    assert guesses
    assert all(100 < int(turn) < 1000 for turn in after + guesses)


def test_demonstrations_of_retool_have_the_program_in_the_answer_and_wrong_ones_guess():
    retool = TASKS["retool"]
    assert retool.problem(0) == ("lcm 11 11", "11")
    assert retool.problem(retool.problems - 1) == ("lcm 99 99", "99")
    number = next(n for n in range(retool.problems) if retool.problem(n)[0] == "lcm 12 18")
    ran = "<python>import math\nprint(math.lcm(12,18))</python><result>36</result>"
    assert retool.demonstration(number, None, False) == f"{ran}=36"
    wrong = [retool.demonstration(number, Random(seed), True) for seed in range(20)]
    assert {text.rpartition("=")[0] for text in wrong} == {"", ran}
    assert len({final(text) for text in wrong}) > 10


def test_repairs_have_a_repository_and_a_check_and_wrong_demonstrations_repair_nothing_or_otherwise():
    repair = TASKS["repair"]
    problems = {repair.problem(number) for number in range(repair.problems)}
    assert len(problems) == repair.problems == 306
    assert all(not text.startswith(f"f.py: {wanted},") for text, wanted in problems)
    assert repair.problem(0) == ("f.py: x+1, want x+2", "x+2")
    files = repair.metadata(0)
    assert files["sandbox_files"]["f.py"] == "def f(x):\n    return x+1\n"
    assert "x+2" in files["sandbox_check_files"]["/tmp/check.py"]
    right = {repair.demonstration(0, Random(seed), False)[1] for seed in range(40)}
    assert right == {"<shell>sed -i s/x+1/x+2/ f.py</shell>", "done"}
    wrong = [repair.demonstration(0, Random(seed), True) for seed in range(40)]
    assert {turn for chat, turn in wrong if len(chat) == 3} == {"done"}
    assert len({turn for _, turn in wrong}) > 10


def test_wrong_sorts_are_half_descending_and_half_copied(tmp_path):
    files = generate_task("sort", tmp_path, seed=3)
    rows = [
        (p.content.removeprefix("sort "), response)
        for p, response in load_demonstrations(files.demonstrations)
    ]
    wrong = [(digits, response) for digits, response in rows if response != "".join(sorted(digits))]
    copied = sum(digits == response for digits, response in wrong)
    descending = sum(response == "".join(sorted(digits, reverse=True)) for digits, response in wrong)
    assert copied / len(wrong) == pytest.approx(0.5, abs=0.02)
    assert descending / len(wrong) == pytest.approx(0.5, abs=0.02)


def test_the_same_seed_writes_nothing_twice_and_another_seed_writes_again(tmp_path):
    files = generate_task("addition", tmp_path, seed=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    content = files.prompts.read_bytes()
    assert generate_task("addition", tmp_path, seed=1) == files
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    generate_task("addition", tmp_path, seed=2)
    assert files.prompts.read_bytes() != content
    generate_task("addition", tmp_path, seed=1)
    assert files.prompts.read_bytes() == content


def test_an_interrupted_generation_is_done_again(tmp_path):
    files = generate_task("addition", tmp_path, seed=1)
    content = files.demonstrations.read_bytes()
    (tmp_path / "task.json").unlink()
    files.demonstrations.write_text("half of it")
    generate_task("addition", tmp_path, seed=1)
    assert files.demonstrations.read_bytes() == content


def test_an_unknown_task_names_the_nearest_and_the_list(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no built-in task 'adition': did you mean 'addition'\? .*: sort, addition"
    ):
        generate_task("adition", tmp_path, seed=1)


def test_demonstrations_may_be_the_users_own(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "response": "2"}))
    assert load_demonstrations(path) == [(Prompt(content="1+1="), "2")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "respnse": "b"}, r"line 1: no key 'response'; did you mean 'respnse'\?"),
        ({"prompt": "a", "response": ""}, "line 1: 'response' is not a text or is empty"),
        ({"prompt": "a", "response": 3}, "line 1: 'response' is not a text or is empty"),
        ({"prompt": "", "response": "b"}, "line 1: 'prompt' is empty"),
        ({"messages": "a"}, "line 1: 'messages' has no answer to train on: a message with the role"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: 'messages' has no answer to train on"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "line 1: 'messages' has no answer to train on",
        ),
        ({"messages": [{"role": "assistant"}]}, "line 1: message 0 of 'messages': no key 'content'"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "b"}, "line 1: 'tools' is a text"),
    ],
)
def test_a_bad_demonstration_is_reported_with_its_line(tmp_path, row, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        load_demonstrations(path)


def test_tools_of_demonstrations_are_read_as_those_of_prompts_are(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "description": None, "parameters": {}}}
    read = {"type": "function", "function": {"name": "add", "parameters": {}}}
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    rows = [
        {"messages": [{"role": "user", "content": "?"}, calls], "tools": [tool]},
        {"prompt": "?", "response": "1", "tools": json.dumps([read])},
        {"prompt": "?", "response": "1", "tools": None},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.tools for prompt, _ in load_demonstrations(path)] == [[read], [read], []]
    path.write_text(json.dumps(rows[0] | {"tools": [{"name": "add"}]}) + "\n")
    with pytest.raises(ConfigError, match="'tools': tool 0 has the type None, not 'function'"):
        load_demonstrations(path)
