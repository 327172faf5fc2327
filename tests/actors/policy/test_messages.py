"""Answers as messages: what an environment appends, and what is wrong with a tool call."""

import numpy as np
import pytest

from actors.policy.messages import Completion, ToolCall, ToolCallError


def completion(**parts) -> Completion:
    return Completion("as written", np.array([1], np.int32), "stop", 0, **parts)


def test_an_answer_becomes_a_message_of_openai():
    call = ToolCall("call_0", "add", '{"a": 1}')
    answer = completion(content="I add.", reasoning="hm", tool_calls=(call,))
    assert answer.message == {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
    assert completion(content="4").message == {"role": "assistant", "content": "4"}


def test_malformed_calls_stay_in_the_message():
    answer = completion(content="I add.", malformed_calls=("<tool_call>{</tool_call>",))
    assert answer.message["content"] == "I add.\n<tool_call>{</tool_call>"


def test_arguments_are_read_as_json():
    assert ToolCall("0", "add", '{"a": [1, null]}').parsed() == {"a": [1, None]}


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ('{"a": 1', "are no JSON: Expecting"),
        ("", "are no JSON: Expecting value"),
        ("[1]", "are no JSON object, but list"),
        ("[" * 100_000, "are no JSON"),
    ],
)
def test_arguments_that_are_no_object_are_refused_with_what_is_wrong(arguments, wrong):
    with pytest.raises(ToolCallError, match=f"the arguments of add {wrong}"):
        ToolCall("0", "add", arguments).parsed()
