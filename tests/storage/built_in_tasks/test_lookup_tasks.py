"""Built-in tasks whose answers only a tool knows: what their files say, and how noisy they are."""

import pytest

from bus.errors import ConfigError
from storage.built_in_tasks.generators import TASKS, generate_task, load_demonstrations, task_passages
from storage.built_in_tasks.lookup_tasks import NAMES, SHOP_TOOLS, shop_answer
from storage.prompt_files.dataset import load_prompts
from storage.settings.data import PromptKeys

pytestmark = pytest.mark.slow

KEYS = PromptKeys()


@pytest.fixture(scope="module", params=["search", "shop"])
def generated(request, tmp_path_factory):
    """The name of a task, and its prompts, held-out prompts and demonstrations."""
    files = generate_task(request.param, tmp_path_factory.mktemp(request.param), seed=1)
    prompts, heldout = (load_prompts(path, KEYS) for path in (files.prompts, files.heldout))
    return request.param, [*prompts], [*heldout], [*load_demonstrations(files.demonstrations)]


@pytest.fixture(scope="module")
def facts():
    """What the corpus says, read from its passages."""
    return dict(passage.split(": ") for passage in task_passages("search"))


def known(question: str, facts: dict[str, str]) -> str:
    """Return what the corpus or the shop says to a question."""
    asked = question.removesuffix("?")
    kind, _, name = asked.partition(" of ")
    return shop_answer(kind, name) if kind in SHOP_TOOLS else facts[asked]


def test_every_label_is_what_the_corpus_or_the_shop_says(generated, facts):
    name, own, heldout, _ = generated
    prompts = [*own, *heldout]
    assert len({row.content for row in prompts}) == len(prompts) == TASKS[name].problems
    assert all(row.label == known(row.content, facts) for row in prompts)


def test_held_out_questions_are_asked_in_no_demonstration(generated):
    name, prompts, held_out, demonstrations = generated
    heldout = {row.content for row in held_out}
    asked = {prompt.content[0]["content"] for prompt, _ in demonstrations}
    assert len(heldout) == TASKS[name].heldout
    assert heldout.isdisjoint(asked)
    assert heldout.isdisjoint(row.content for row in prompts)


def test_the_promised_share_of_demonstrations_calls_well_or_answers_right(generated, facts):
    name, _, _, demonstrations = generated
    right = [is_right(prompt.content, response, facts) for prompt, response in demonstrations]
    calls = [response.startswith("<") for _, response in demonstrations]
    assert 1 - sum(right) / len(right) == pytest.approx(TASKS[name].wrong_share, abs=0.015)
    assert sum(map(min, right, calls)) / sum(right) == pytest.approx(0.5, abs=0.02)
    assert {(True, True), (True, False), (False, True), (False, False)} == {*zip(right, calls, strict=True)}


def is_right(chat, response: str, facts: dict[str, str]) -> bool:
    asked = chat[0]["content"].removesuffix("?")
    kind, _, name = asked.partition(" of ")
    good = f"<{kind}>{name}</{kind}>" if kind in SHOP_TOOLS else f"<search>{asked}</search>"
    return response in (good, known(asked, facts))


def test_results_in_demonstrations_say_what_the_corpus_or_the_shop_says(generated, facts):
    *_, demonstrations = generated
    second = [p.content for p, _ in demonstrations if len(p.content) > 1]
    for question, call, result in second:
        said = result["content"].removeprefix("<result>").removesuffix("</result>")
        tool, _, query = call["content"].removeprefix("<").partition("</")[0].partition(">")
        if tool == "search":
            passages = [line.partition("] ")[2].split(": ") for line in said.splitlines()]
            assert len(passages) == 2
            assert all(facts[fact] == answer for fact, answer in passages)
            assert passages[0][0].startswith(query)
        else:
            assert said == shop_answer(tool, query)
            assert query in question["content"]


def test_no_answer_is_a_name_so_that_a_query_finds_no_passage_by_it(facts):
    names = {fact.partition(" of ")[2] for fact in facts}
    assert len(names) == NAMES
    assert names.isdisjoint(facts.values())


def test_only_tasks_with_a_corpus_have_passages():
    for name in ("sort", "serach"):
        with pytest.raises(ConfigError, match=f"no built-in task '{name}' with a corpus: there are: search"):
            task_passages(name)
