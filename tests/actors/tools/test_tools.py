"""The tools that come with Sluice, and loading of a user's own."""

import json
import sys
from importlib import import_module

import pytest
from pydantic import BaseModel, ValidationError

from actors.sandboxes.limits import Limits
from actors.sandboxes.sandbox import decoded
from actors.settings.tool_chat import ToolsConfig
from actors.settings.tools import CalculatorConfig, PluginToolConfig, PythonToolConfig, SearchConfig
from actors.tools.base import ToolResult, function_schema, shortened
from actors.tools.build import build_tools
from actors.tools.calculator import Calculator
from actors.tools.python import PythonTool
from actors.tools.search import search_tools
from bus.errors import ConfigError
from bus.process.plugins import ImportPolicy, restrict_imports
from storage.built_in_tasks.generators import task_passages


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (2+3)*4 ", "20"),
        ("-7//2", "-4"),
        ("7%4-2**3", "-5"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("sqrt(16)+floor(2.5)", "6"),
        ("2**100", str(2**100)),
        ("cos(pi)", "-1"),
    ],
)
async def test_the_calculator_computes(expression, value):
    assert await Calculator().call({"expression": expression}) == ToolResult(value)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "too large"),
        ("10**10000", "too large"),
        ("*".join(["9**2000"] * 90), "Exceeds the limit"),
        ("1.5**99999", "out of range"),
        ("(-1)**0.5", "no real number"),
        ("2+", "invalid syntax"),
        ("", "invalid syntax"),
        ("__import__('os').system('id')", "no arithmetic"),
        ("().__class__", "no arithmetic"),
        ("True+1", "no arithmetic"),
        ("1+1" * 400, "1200 characters"),
        ("(" * 300 + "1" + ")" * 300, "nested"),
        ("\0", "null bytes"),
    ],
)
async def test_the_calculator_says_what_is_wrong(expression, said):
    result = await Calculator().call({"expression": expression})
    assert result.failed
    assert said in result.text


def test_long_text_loses_its_middle_and_says_so():
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefg", 5) == "abc\n[2 characters left out]\nfg"
    assert len(shortened("x" * 100_000_000, 100)) < 150
    assert decoded(b"a\xffb\0") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [
        {"title": "Paris", "text": "The capital of France is Paris, on the river Seine."},
        {"text": "Berlin lies on the river Spree."},
        {"text": "A cat sat on a mat. " * 100},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_search_finds_the_passages_that_share_words_the_best_first(corpus):
    [tool] = search_tools(SearchConfig(corpus=corpus, top_k=2, passage_characters=60))
    found = await tool.call({"query": "river in France"})
    assert found.text.splitlines() == [
        "[1] (Paris) The capital of France is Paris, on the river Seine.",
        "[2] Berlin lies on the river Spree.",
    ]
    assert (await tool.call({"query": "zebra"})).text == "nothing found"
    assert (await tool.call({"query": "the"})).text == "nothing found"
    assert (await tool.call({"query": "\ud800 \0"})).text == "nothing found"
    assert len((await tool.call({"query": "cat"})).text) < 110


async def test_a_document_is_read_whole_by_the_title_that_a_search_shows(tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = ["Paris is a city.", "It lies on the Seine."]
    rows = [{"text": "It has no title."}, *({"title": "Paris ", "text": text} for text in texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SearchConfig(corpus=path, fetch="read", fetched_characters=20)
    search, read = build_tools([config]).values()
    assert "(Paris) It lies on" in (await search.call({"query": "Seine"})).text
    parts = [await read.call({"title": "\nParis", "start": start}) for start in (0, 20)]
    whole = "\n".join(texts)
    assert parts[0].text == f"{whole[:20]}\n[18 characters follow from start=20 on]"
    assert parts[1] == ToolResult(whole[20:])
    for wrong in (
        {"title": "Rome"},
        {"title": "Paris", "start": len(whole)},
        {"title": "Paris", "start": -1},
    ):
        assert (await read.call(wrong)).failed
    assert ToolsConfig(type="tools", reward="exact", tools=(config,)).known_tools == ["search", "read"]
    with pytest.raises(ValidationError, match=r"cut 'read' in the middle: set .*=3900 to 3899 at most"):
        ToolsConfig(type="tools", output_characters=3999, tools=(SearchConfig(corpus=path, fetch="read"),))
    path.write_text(json.dumps({"text": "Paris"}))
    with pytest.raises(ConfigError, match="no passage has a 'title', by which the tool 'read'"):
        build_tools([config])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ('{"text": ""}', "line 1: 'text' is not a text"),
        ('{"body": "x"}', "no key 'text'"),
        ('{"text": "the"}', "nothing in it can be found"),
        ("", "holds no rows"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_a_config_error(tmp_path, rows, said):
    (tmp_path / "corpus.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=said):
        search_tools(SearchConfig(corpus=tmp_path / "corpus.jsonl"))


def test_other_tools_need_no_package_that_the_search_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)  # as if it were not installed
    for module in ("actors.tools.search", "actors.tools.build"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert [*import_module("actors.tools.build").build_tools([CalculatorConfig()])] == ["calculator"]


async def test_a_corpus_may_be_that_of_a_built_in_task_which_no_stranger_can_turn_into_a_file(corpus):
    try:
        restrict_imports(ImportPolicy(refusal="comes from the run's record"))
        [tool] = build_tools([SearchConfig(corpus="task:search", top_k=1)]).values()
        with pytest.raises(ConfigError, match="comes from the run's record"):
            build_tools([SearchConfig(corpus=corpus)])
    finally:
        restrict_imports(ImportPolicy())
    passage = task_passages("search")[7]
    assert (await tool.call({"query": passage.partition(":")[0]})).text == f"[1] {passage}"
    with pytest.raises(ConfigError, match="no built-in task 'sort' with a corpus: there are: search"):
        build_tools([SearchConfig(corpus="task:sort")])


async def test_the_python_tool_answers_like_a_terminal():
    tool = PythonTool.from_config(PythonToolConfig(output_kb=1))
    try:
        assert await tool.call({"code": "print(6 * 7)"}) == ToolResult("42")
        assert await tool.call({"code": "x = 1"}) == ToolResult("[no output]")
        failed = await tool.call({"code": "print('a')\n1/0"})
        assert failed.failed
        assert failed.text.startswith("a\nTraceback")
        assert failed.text.endswith("ZeroDivisionError: division by zero")
        much = await tool.call({"code": "print('a' * 10**8)"})
        assert much == ToolResult("a" * 1024 + "\n[stopped: it printed too much]", failed=True)
        crash = await tool.call({"code": "import ctypes; ctypes.string_at(0)"})
        assert crash == ToolResult("[ended by signal 11]", failed=True)
    finally:
        await tool.close()


async def test_the_python_tool_says_that_it_stopped_a_program():
    tool = PythonTool.from_config(PythonToolConfig(wall_s=0.5))
    try:
        stopped = await tool.call({"code": "print('a', flush=True)\nwhile True: pass"})
        assert stopped == ToolResult("a\n[stopped after 0.5 s]", failed=True)
    finally:
        await tool.close()


async def test_the_python_tool_may_import_the_packages_that_the_settings_name():
    code = "import numpy, xxhash, os; print(numpy.arange(4).sum(), os.access(xxhash.__file__, os.W_OK))"
    tool = PythonTool.from_config(PythonToolConfig(packages=("numpy",)))
    try:
        assert await tool.call({"code": code}) == ToolResult("6 False")
    finally:
        await tool.close()
    with pytest.raises(ConfigError, match="no_such_package"):
        PythonTool.from_config(PythonToolConfig(packages=("no_such_package",)))


class Dice:
    """A tool of the user's own."""

    name, description = "dice", "Rolls a die."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    class Settings(BaseModel):
        sides: int = 6

    def __init__(self, settings):
        self.sides = settings.sides

    async def call(self, arguments):
        return ToolResult(str(self.sides))

    async def close(self):
        pass


async def test_a_tool_of_the_users_own_is_built_with_its_settings(monkeypatch):
    monkeypatch.setitem(sys.modules, "users_tools", sys.modules[__name__])
    config = PluginToolConfig(type="plugin", tool="users_tools:Dice", settings={"sides": 4})
    tools = build_tools([config])
    assert await tools["dice"].call({}) == ToolResult("4")
    assert function_schema(tools["dice"]) == {
        "type": "function",
        "function": {"name": "dice", "description": "Rolls a die.", "parameters": Dice.parameters},
    }
    with pytest.raises(ConfigError, match="two named 'dice'"):
        build_tools([config, config])


@pytest.mark.parametrize(
    ("tool", "settings", "said"),
    [
        ("users_tools:Nothing", {}, "does not exist"),
        (
            "users_tools:Dice",
            {"sides": "many"},
            "(?s)settings.sides: Input should be a valid.*Settings of 'users_tools:Dice' are: sides",
        ),
        ("users_tools:decoded", {}, "cannot be built"),
        ("users_tools:dict", {}, "does not exist"),
        ("builtins:dict", {}, "has no name and no description"),
        ("builtins:dict", {"a": 1}, "takes no settings"),
    ],
)
def test_what_is_no_tool_is_a_config_error(monkeypatch, tool, settings, said):
    monkeypatch.setitem(sys.modules, "users_tools", sys.modules[__name__])
    with pytest.raises(ConfigError, match=said):
        build_tools([PluginToolConfig(type="plugin", tool=tool, settings=settings)])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([], "at least 1"),
        ([{"type": "calculator"}, {"type": "calculator"}], "two named calculator"),
        ([{"type": "calculater"}], "union_tag_invalid|does not match any of the expected tags"),
        ([{"type": "calculator", "name": "a b"}], "should match pattern"),
        ([{"type": "python", "wall_s": 0}], "greater than 0"),
        ([{"type": "python", "memory_mb": 1}], "greater than or equal to 64"),
    ],
)
def test_settings_of_tools_are_checked(tools, said):
    with pytest.raises(ValueError, match=said):
        ToolsConfig.model_validate({"type": "tools", "tools": tools})


def test_packages_below_tmp_are_not_hidden_by_the_directory_of_a_program():
    assert Limits().home == "/tmp"
    assert Limits(package_directories=("/usr/lib", "/tmp/venv/lib")).home == "/home"
