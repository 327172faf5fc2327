"""Reasoning and tool calls are read as each family of models writes them; nothing written is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.answers import AnswerReader
from actors.policy.messages import ToolCallError
from actors.policy.tool_calls import CALL_FORMATS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": ["number", "null"]},
                    "note": {"type": "string"},
                    "exact": {"type": "boolean"},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                },
            },
        },
    }
]
TEMPLATES = {
    "hermes": "<tool_call> {{ tool_call.arguments }}",
    "qwen3_coder": "<tool_call> <function=",
    "llama3": '{"name": function name, "parameters": ...}',
    "mistral": "[TOOL_CALLS]",
}


def read(text: str, family: str = "hermes", *, tools=TOOLS, in_reasoning=False):
    return AnswerReader(TEMPLATES.get(family, ""), "auto" if family in TEMPLATES else family).read(
        text, in_reasoning=in_reasoning, tools=tools, number=3
    )


def calls(answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"arguments":{"a": 1},"name":"add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<function=add><parameter=a>1</parameter></function>",
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": 1}}',
        '\n {"type": "function", "name": "add", "parameters": {"a": 1}} ',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}};',
        '{"name": "add", "arguments": {"a": 1}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        '[TOOL_CALLS]add{"a": 1}',
    ],
}


@pytest.mark.parametrize(("family", "text"), [(f, text) for f, texts in WRITTEN.items() for text in texts])
def test_a_call_is_read(family, text):
    answer = read(text, family)
    assert calls(answer) == [("add", '{"a": 1}')]
    assert (answer.content, answer.reasoning, answer.malformed_calls) == ("", None, ())
    assert answer.tool_calls[0].parsed() == {"a": 1}


TWICE = {
    "hermes": '<tool_call>{"name": "add"}</tool_call>\n<tool_call>{"name": "sub"}</tool_call>',
    "qwen3_coder": "<tool_call><function=add></function></tool_call><tool_call><function=sub></function>",
    "llama3": '{"name": "add", "parameters": {}}; {"name": "sub", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "sub", "arguments": {}}]',
}


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_behind_each_other_have_ids_of_their_own(family):
    answer = read(TWICE[family], family)
    assert calls(answer) == [("add", "{}"), ("sub", "{}")]
    assert [call.id for call in answer.tool_calls] == ["000003000", "000003001"]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.tool_calls)  # as Mistral wants them
    assert not answer.malformed_calls


MALFORMED = {
    "hermes": [
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}, }</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call>" + '{"a":' * 20_000 + "</tool_call>",
        "<tool_call>add(1)",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>{}</tool_call>",
        "<function=add><parameter=a>1",
    ],
    "llama3": [
        '{"name": "add", "parameters": {"a": 1}',
        '{"name": "add", "parameters": {}} and so on',
        "<|python_tag|>print(1)",
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {}}, 3]',
        "[TOOL_CALLS]add[ARGS]{1}",
    ],
}


@pytest.mark.parametrize(("family", "text"), [(f, text) for f, texts in MALFORMED.items() for text in texts])
def test_what_is_no_call_is_returned_as_text(family, text):
    answer = read(text, family)
    assert (answer.tool_calls, answer.malformed_calls, answer.content) == ((), (text,), "")


def test_a_malformed_call_ends_where_the_next_one_begins():
    answer = read('x<tool_call>{"a<tool_call>{"name": "add"}</tool_call>y<tool_call>?</tool_call>')
    assert calls(answer) == [("add", "{}")]
    assert answer.malformed_calls == ('<tool_call>{"a', "<tool_call>?</tool_call>")
    assert answer.content == "xy"


@pytest.mark.parametrize("family", WRITTEN)
def test_without_tools_there_are_no_calls(family):
    for text in (*WRITTEN[family], *MALFORMED[family], "it is 3"):
        answer = read(text, family, tools=())
        assert (answer.content, answer.tool_calls, answer.malformed_calls) == (text, (), ())


@pytest.mark.parametrize("family", WRITTEN)
def test_calls_inside_of_reasoning_are_none(family):
    text = WRITTEN[family][0]
    answer = read(f"<think>\nI could {text}\n</think>\n\n{text}", family)
    assert calls(answer) == [("add", '{"a": 1}')]
    assert answer.reasoning == f"I could {text}"
    unended = read(f"<think>I could {text}", family)
    assert (unended.tool_calls, unended.content, unended.reasoning) == ((), "", f"I could {text}")


def test_reasoning_may_begin_in_the_prompt():
    reader = AnswerReader("...<think>\n")
    assert reader.opens_reasoning("<|assistant|>\n<think>\n")
    assert not reader.opens_reasoning("<|assistant|>\n<think>\n\n</think>\n\n")
    answer = reader.read("hm\n</think>\n\n4", in_reasoning=True, tools=(), number=0)
    assert (answer.reasoning, answer.content) == ("hm", "4")
    unended = reader.read("hm", in_reasoning=True, tools=(), number=0)
    assert (unended.reasoning, unended.content) == ("hm", "")


def test_a_template_may_mark_reasoning_otherwise():
    answer = AnswerReader("[THINK]").read("[THINK]hm[/THINK]<think>", in_reasoning=False, tools=(), number=0)
    assert (answer.reasoning, answer.content) == ("hm", "<think>")


def test_empty_reasoning_is_none():
    answer = read("<think>\n\n</think>\n\n4")
    assert (answer.reasoning, answer.content) == (None, "4")


def test_text_around_calls_stays_content_and_text_alone_stays_as_it_is():
    answer = read('Let me add. <tool_call>{"name": "add"}</tool_call> Done.')
    assert answer.content == "Let me add. Done."
    assert read("  4\n").content == "  4\n"


def test_marks_inside_of_arguments_are_text():
    code = 'x = "</tool_call><think>"'
    text = json.dumps({"name": "add", "arguments": {"note": code}})
    answer = read(f"<tool_call>{text}</tool_call>")
    assert answer.tool_calls[0].parsed() == {"note": code}
    assert answer.reasoning is None


def test_a_schema_says_what_parameters_of_qwen3_coder_are():
    written = {
        "a": "1", "b": "2.5", "note": "1\n</parameter>\nx", "exact": "True", "either": "3", "other": "7",
    }  # fmt: skip
    parameters = "\n".join(f"<parameter={k}>\n{v}\n</parameter>" for k, v in written.items())
    answer = read(f"<tool_call>\n<function=add>\n{parameters}\n</function>\n</tool_call>", "qwen3_coder")
    expected = {"a": 1, "b": 2.5, "note": "1\n</parameter>\nx", "exact": True, "either": 3, "other": "7"}
    assert answer.tool_calls[0].parsed() == expected
    wrong = read("<function=add><parameter=a>one</parameter></function>", "qwen3_coder")
    assert wrong.tool_calls[0].parsed() == {"a": "one"}


def test_json_that_is_no_call_is_an_answer_of_llama():
    for text in (
        '{"answer": 4}',
        '{"name": "Ann", "age": 4}',
        '{"a": {"name": "add"}}',
        '4 {"name": "add", "parameters": {}}',
    ):
        answer = read(text, "llama3")
        assert (answer.content, answer.tool_calls, answer.malformed_calls) == (text, (), ())


def test_arguments_that_are_no_object_are_a_call_that_says_so():
    [call] = read('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>').tool_calls
    with pytest.raises(ToolCallError, match="arguments of add are no JSON object, but list"):
        call.parsed()


def test_the_format_can_be_named_and_is_that_of_hermes_where_nothing_shows_it():
    text = WRITTEN["mistral"][0]
    named = AnswerReader("<tool_call>", "mistral")
    assert calls(named.read(text, in_reasoning=False, tools=TOOLS, number=0)) == [("add", '{"a": 1}')]
    silent = AnswerReader("")
    assert silent.read(WRITTEN["hermes"][0], in_reasoning=False, tools=TOOLS, number=0).tool_calls


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab<>/_{}", max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text("abc", min_size=1), JSONS, max_size=3), st.sampled_from([None, 2]))
def test_any_arguments_come_back(arguments, indent):
    written = json.dumps(arguments, indent=indent)
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>',
        "llama3": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]',
    }
    for family, text in texts.items():
        answer = read(text, family)
        assert calls(answer) == [("f", written)]
        assert answer.tool_calls[0].parsed() == arguments


PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {}}', "{", "}", "[",
    "<function=add>", "<parameter=a>", "</parameter>", "</function>", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "add", "word", ";", ",", "]",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(sorted(CALL_FORMATS)), st.booleans())
def test_every_word_of_an_answer_is_somewhere(pieces, family, in_reasoning):
    text = "".join(pieces)
    answer = read(text, family, in_reasoning=in_reasoning)
    found = [answer.content, answer.reasoning or "", *answer.malformed_calls]
    assert sum(part.count("word") for part in found) + sum(
        call.arguments.count("word") + call.name.count("word") for call in answer.tool_calls
    ) == text.count("word")
