"""What each API's requests mean, and what its clients are shown, quirks of real clients among them."""

import json

import pytest

from actors.engines.base import Sampling
from actors.gateway.dialects.anthropic import ANTHROPIC
from actors.gateway.dialects.exchange import Ask, Reply
from actors.gateway.dialects.google import GOOGLE
from actors.gateway.dialects.known_chats import KnownChats
from actors.gateway.dialects.openai_chat import OPENAI_CHAT
from actors.gateway.dialects.openai_responses import OPENAI_RESPONSES, KeptResponses
from actors.gateway.dialects.refusal import RefusedError, TooLongError
from actors.gateway.session import pinned
from actors.gateway.tool_hooks import ToolHookError, passed
from actors.policy.messages import ToolCall

CALL = ToolCall("call_1", "add", '{"a": 40, "b": 2}')
AS_JSON = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
DECLARED = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
ASK = Ask(model="gpt", messages=({"role": "user", "content": "40+2?"},))
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "40+2?"},
    {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": [AS_JSON]},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
]

HELLO = {"role": "user", "content": "hi"}
RESULTS = [{"type": "text", "text": "so"}, {"type": "tool_result", "tool_use_id": "1", "content": "42"}]
IMAGE = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}


def reply(**changes) -> Reply:
    values = {
        "reply_id": "r", "created_s": 7, "content": "42", "reasoning": None, "tool_calls": (),
        "finish": "stop", "prompt_tokens": 5, "completion_tokens": 3,
    }  # fmt: skip
    return Reply(**{**values, **changes})


CALLING = reply(content="", reasoning="hm", tool_calls=(CALL,), finish="tool_calls")


def ask(dialect, **body) -> Ask:
    raw = json.dumps(body).encode()
    if dialect is OPENAI_RESPONSES:
        return KeptResponses(1 << 20).read(raw).ask
    return dialect.parse(raw, KnownChats())


def events(dialect, what: Reply, asked: Ask = ASK) -> list[dict]:
    """The data of an answer's events, each of which has a name that says its type, if it has one."""
    found = []
    for event in b"".join(dialect.events(asked, what)).decode().strip().split("\n\n"):
        *name, data = event.split("\n")
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
            assert name in ([], [f"event: {found[-1].get('type')}"])
    return found


def test_four_apis_say_the_same_conversation():
    chat = ask(OPENAI_CHAT, messages=CONVERSATION, tools=[DECLARED])
    anthropic = ask(
        ANTHROPIC,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "40+2?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "recorded"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 40, "b": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [{"type": "text", "text": "42"}],
                    }
                ],
            },
        ],
        tools=[{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        max_tokens=9,
    )
    responses = ask(
        OPENAI_RESPONSES,
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "40+2?"}]},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": CALL.arguments},
            {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        ],
        tools=[
            {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
        ],
    )
    google = ask(
        GOOGLE,
        systemInstruction={"parts": [{"text": "be brief"}]},
        contents=[
            {"role": "user", "parts": [{"text": "40+2?"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"text": "I add."},
                    {"functionCall": {"id": "call_1", "name": "add", "args": {"a": 40, "b": 2}}},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"output": "42"}}}]},
        ],
        tools=[
            {
                "functionDeclarations": [
                    {
                        "name": "add",
                        "description": "adds",
                        "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
                    }
                ]
            },
            {"googleSearch": {}},
        ],
    )
    asked = [list(each.messages) for each in (chat, anthropic, responses, google)]
    assert asked == [CONVERSATION] * 4
    assert chat.tools == anthropic.tools == responses.tools == google.tools == (DECLARED,)
    assert google.left_out == ("googleSearch",)


def test_what_a_user_says_after_tool_results_follows_them():
    result = {"type": "tool_result", "tool_use_id": "c", "content": "42"}
    said = {"type": "text", "text": "go on"}
    messages = ask(ANTHROPIC, messages=[{"role": "user", "content": [result, said]}]).messages
    assert [message["role"] for message in messages] == ["tool", "user"]


def test_no_tools_are_no_tools_whatever_is_said_of_them():
    """codex sends an empty list together with parallel_tool_calls."""
    hello = [{"role": "user", "content": "hi"}]
    assert ask(OPENAI_CHAT, messages=hello, tools=[], parallel_tool_calls=True).tools == ()
    assert ask(OPENAI_RESPONSES, input="hi", tools=[], parallel_tool_calls=True).tools == ()
    assert ask(OPENAI_CHAT, messages=hello, tools=[DECLARED], tool_choice="none").tools == ()
    assert ask(OPENAI_CHAT, messages=hello, tools=None, stop=None, stream=None, n=None).tools == ()


def test_developer_messages_are_system_messages():
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert ask(OPENAI_CHAT, messages=messages).messages[0]["role"] == "system"
    assert ask(OPENAI_RESPONSES, input=messages).messages[0]["role"] == "system"


URI = "data:image/png;base64,AA=="
SHOWN = {
    OPENAI_CHAT: {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    OPENAI_RESPONSES: {"type": "input_image", "image_url": URI, "detail": "auto"},
    ANTHROPIC: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    GOOGLE: {"inlineData": {"mimeType": "image/png", "data": "AA=="}},
}
"""An image as each API has it."""


@pytest.mark.parametrize("dialect", SHOWN)
def test_images_are_parts_of_their_message_in_each_api(dialect):
    text = {"type": "text", "text": "how many?"}
    image = {"type": "image_url", "image_url": {"url": URI}}
    asked = {"role": "user", "parts" if dialect is GOOGLE else "content": [text, SHOWN[dialect]]}
    where = {OPENAI_RESPONSES: "input", GOOGLE: "contents"}.get(dialect, "messages")
    [message] = ask(dialect, **{where: [asked]}).messages
    assert message == {"role": "user", "content": [text, image]}


def test_images_that_tools_answer_are_parts_of_their_answers():
    image = {"type": "image_url", "image_url": {"url": URI}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [SHOWN[ANTHROPIC]]}
    [message] = ask(ANTHROPIC, messages=[{"role": "user", "content": [result]}]).messages
    assert message == {"role": "tool", "tool_call_id": "c", "content": [image]}
    output = {"type": "function_call_output", "call_id": "c", "output": [SHOWN[OPENAI_RESPONSES]]}
    assert ask(OPENAI_RESPONSES, input=[output]).messages == (message,)


def test_a_tool_that_failed_says_so_to_the_policy():
    def said(content):
        result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": True}
        [message] = ask(ANTHROPIC, messages=[{"role": "user", "content": [result]}]).messages
        return message["content"]

    assert said("no such file") == "Error: no such file"
    assert said("Error: no such file") == "Error: no such file"
    assert said([SHOWN[ANTHROPIC]])[0] == {"type": "text", "text": "Error: "}


def test_tools_that_anthropics_clients_carry_out_are_offered_and_hosted_ones_left_out():
    kinds = ("bash_20250124", "text_editor_20250728", "memory_20250818", "web_search_20250305")
    tools = [{"type": kind, "name": kind.split("_")[0]} for kind in kinds] + [{"type": "mcp_toolset"}]
    asked = ask(ANTHROPIC, messages=CONVERSATION[1:2], tools=tools)
    offered = {tool["function"]["name"]: tool["function"] for tool in asked.tools}
    assert list(offered) == ["bash", "text", "memory"]
    assert "command" in offered["bash"]["parameters"]["properties"]
    assert "str_replace" in offered["text"]["parameters"]["properties"]["command"]["enum"]
    assert asked.left_out == ("web_search_20250305", "mcp_toolset")


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
CODEX_TOOLS = [
    {"type": "function", "name": "shell", "parameters": SCHEMA},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    {
        "type": "namespace",
        "name": "functions",
        "tools": [{"type": "custom", "name": "exec", "description": "Runs it.", "format": GRAMMAR}],
    },
    {"type": "web_search", "external_web_access": False},
]
"""Tools as Codex 0.171 declares them."""


@pytest.mark.parametrize("as_item", [False, True])
def test_namespaces_are_flat_custom_tools_are_offered_and_hosted_ones_left_out(as_item):
    user = {"role": "user", "content": "hi"}
    added = {"type": "additional_tools", "role": "developer", "tools": CODEX_TOOLS}
    body = {"input": [added, user]} if as_item else {"input": [user], "tools": CODEX_TOOLS}
    asked = ask(OPENAI_RESPONSES, **body)
    assert asked.messages == (user,)
    offered = {tool["function"]["name"]: tool["function"] for tool in asked.tools}
    assert list(offered) == ["shell", "agents__spawn", "exec"]
    assert "start: /.+/" in offered["exec"]["description"]
    assert offered["exec"]["parameters"]["required"] == ["input"]
    assert asked.left_out == ("web_search",)


def test_calls_come_back_as_their_tools_were_declared_and_are_read_again():
    asked = ask(OPENAI_RESPONSES, input="hi", tools=CODEX_TOOLS)
    called = (
        ToolCall("a", "agents__spawn", '{"n": 1}'),
        ToolCall("b", "exec", '{"input": "ls\\n"}'),
        ToolCall("c", "exec", "no JSON"),
    )
    what = reply(content="", tool_calls=called, finish="tool_calls")
    spawn, run, broken = items = OPENAI_RESPONSES.body(asked, what)["output"]
    assert (spawn["type"], spawn["name"], spawn["namespace"]) == ("function_call", "spawn", "agents")
    assert (run["type"], run["name"], run["input"]) == ("custom_tool_call", "exec", "ls\n")
    assert broken["input"] == "no JSON"
    streamed = events(OPENAI_RESPONSES, what, asked)
    assert "response.custom_tool_call_input.done" in [event["type"] for event in streamed]
    answered = {"type": "custom_tool_call_output", "call_id": "b", "output": "a.py"}
    again = ask(OPENAI_RESPONSES, input=[{"role": "user", "content": "hi"}, *items[:2], answered])
    _, assistant, output = again.messages
    assert assistant["tool_calls"] == [call.as_json for call in called[:2]]
    assert output == {"role": "tool", "tool_call_id": "b", "content": "a.py"}


def test_words_that_an_anthropic_client_begins_the_answer_with_are_a_prefix():
    said = [{"role": "user", "content": "40+2?"}, {"role": "assistant", "content": "It is"}]
    asked = ask(ANTHROPIC, messages=said)
    assert (len(asked.messages), asked.prefix) == (1, "It is")


def test_a_stop_sequence_is_named_to_anthropics_clients():
    body = ANTHROPIC.body(ASK, reply(stop_text="END"))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    delta = events(ANTHROPIC, reply(stop_text="END"))[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", "END")


def test_several_choices_have_numbers_log_probs_and_one_sum_of_tokens():
    two = reply(further=(reply(content="43"),), logprobs=(("4", -0.5), ("2", -1.0)))
    body = OPENAI_CHAT.body(ASK, two)
    first, second = body["choices"]
    assert [token["logprob"] for token in first["logprobs"]["content"]] == [-0.5, -1.0]
    assert (second["index"], second["message"]["content"], second["logprobs"]) == (1, "43", None)
    assert body["usage"]["completion_tokens"] == 6
    numbers = {chunk["choices"][0]["index"] for chunk in events(OPENAI_CHAT, two)}
    assert numbers == {0, 1}


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        (OPENAI_CHAT, "This model's maximum context length is 110 tokens"),
        (ANTHROPIC, "prompt is too long: 112 tokens > 110 maximum"),
        (GOOGLE, "The input token count (112) exceeds the maximum number of tokens allowed (110)."),
    ],
)
def test_too_long_a_prompt_is_told_in_the_words_of_the_api(dialect, words):
    assert words in dialect.error(TooLongError(112, 110))["error"]["message"]


def test_what_is_asked_for_and_not_done_is_named():
    hello = [{"role": "user", "content": "hi"}]
    asked = ask(OPENAI_CHAT, messages=hello, frequency_penalty=0.5, seed=0, stop="x")
    assert (asked.unmet, asked.stop) == (("frequency_penalty",), ("x",))
    assert ask(OPENAI_CHAT, messages=hello, tool_choice="auto", presence_penalty=0.0).unmet == ()
    shaped = ask(OPENAI_CHAT, messages=hello, response_format={"type": "json_object"}, top_logprobs=3)
    assert shaped.unmeetable == ("response_format", "top_logprobs")
    schema = {"type": "json_schema", "name": "A", "schema": SCHEMA}  # openai-agents with an output_type
    structured = ask(OPENAI_RESPONSES, input="hi", text={"format": schema, "verbosity": "low"})
    assert structured.unmeetable == ("text.format",)
    assert ask(OPENAI_RESPONSES, input="hi", text={"format": {"type": "text"}}).unmeetable == ()


@pytest.mark.parametrize(
    ("dialect", "field", "unmet", "unmeetable"),
    [
        (OPENAI_CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", ""),
        (OPENAI_CHAT, {"repetition_penalty": 1.1, "user": "me", "store": True}, "repetition_penalty", ""),
        (OPENAI_CHAT, {"a\r\nSet-Cookie: b": 1, "modalities": ["text"], "min_p": 0}, "", ""),
        (OPENAI_CHAT, {"functions": [{"name": "add"}]}, "", "functions"),
        (OPENAI_CHAT, {"structured_outputs": {"regex": "a+"}}, "", "structured_outputs"),
        (OPENAI_RESPONSES, {"prompt": {"id": "pmpt_1"}, "truncation": "disabled"}, "", "prompt"),
        (OPENAI_RESPONSES, {"max_tool_calls": 2, "reasoning": {}}, "max_tool_calls", ""),
        (OPENAI_RESPONSES, {"include": ["message.output_text.logprobs"]}, "", "include"),
        (OPENAI_RESPONSES, {"include": ["reasoning.encrypted_content"]}, "", ""),
        (OPENAI_RESPONSES, {"include": None}, "", ""),
        (ANTHROPIC, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}, "", ""),
        (ANTHROPIC, {"cache_control": {"type": "ephemeral"}}, "", ""),
        (OPENAI_CHAT, {"unread": 1, "json": None}, "unread", ""),
        (ANTHROPIC, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "", "output_format"),
        (ANTHROPIC, {"output_config": {"format": SCHEMA}}, "", "output_config.format"),
        (ANTHROPIC, {"output_config": {"effort": "low"}}, "output_config.effort", ""),
        (ANTHROPIC, {"context_management": {"edits": [1]}}, "context_management", ""),
        (GOOGLE, {"cachedContent": "cachedContents/7"}, "", "cachedContent"),
        (GOOGLE, {"generationConfig": {"responseModalities": ["IMAGE"]}}, "", "responseModalities"),
        (GOOGLE, {"generation_config": {"responseModalities": ["TEXT"]}, "labels": {"a": "b"}}, "", ""),
    ],
)
def test_whatever_a_request_sets_and_nothing_reads_is_named(dialect, field, unmet, unmeetable):
    said = {
        OPENAI_RESPONSES: {"input": "hi"},
        GOOGLE: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    }.get(dialect, {"messages": [HELLO]})
    found = ask(dialect, **said, **field)
    assert (found.unmet, found.unmeetable) == tuple((name,) if name else () for name in (unmet, unmeetable))


def test_names_of_speakers_reach_the_template():
    said = [{**HELLO, "name": "Ann"}, {"role": "tool", "tool_call_id": "1", "name": "add", "content": "42"}]
    assert [one.get("name") for one in ask(OPENAI_CHAT, messages=said).messages] == ["Ann", "add"]


def test_refusals_are_words_of_the_assistant():
    words = [{"type": "refusal", "refusal": "I "}, {"type": "text", "text": "won't"}]
    for said in ({"content": words}, {"content": None, "refusal": "I won't"}):
        asked = ask(OPENAI_CHAT, messages=[HELLO, {"role": "assistant", **said}, HELLO])
        assert asked.messages[1]["content"] == "I won't"
    [_, message, _] = ask(
        OPENAI_RESPONSES, input=[HELLO, {"role": "assistant", "content": words}, HELLO]
    ).messages
    assert message["content"] == "I won't"


@pytest.mark.parametrize("more", [{"continue_final_message": True, "add_generation_prompt": False}, {}])
def test_an_answer_that_an_openai_client_has_begun_is_a_prefix(more):
    begun = {"role": "assistant", "content": "It is", **({} if more else {"prefix": True})}
    asked = ask(OPENAI_CHAT, messages=[HELLO, begun], **more)
    assert (asked.prefix, len(asked.messages), asked.unmet, asked.unmeetable) == ("It is", 1, (), ())
    asked = ask(OPENAI_CHAT, messages=[HELLO, {"role": "assistant", "content": "It is"}])
    assert (asked.prefix, len(asked.messages)) == ("", 2)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_allowed_are_known(mode):
    tools = [{"type": "function", "name": "add"}, {"type": "custom", "name": "patch"}]
    flat = {"type": "allowed_tools", "mode": mode, "tools": tools}
    deep = [
        {"type": "function", "function": {"name": "add"}},
        {"type": "function", "function": {"name": "patch"}},
    ]
    for dialect, said, choice in (
        (OPENAI_RESPONSES, {"input": "hi"}, flat),
        (
            OPENAI_CHAT,
            {"messages": [HELLO]},
            {"type": "allowed_tools", "allowed_tools": {**flat, "tools": deep}},
        ),
    ):
        asked = ask(dialect, **said, tool_choice=choice)
        assert asked.may_call == ("add", "patch")
        assert asked.must_call == (("add", "patch") if mode == "required" else None)


@pytest.mark.parametrize(
    ("dialect", "choice", "tools"),
    [
        (OPENAI_CHAT, "auto", None),
        (OPENAI_CHAT, "required", ()),
        (OPENAI_CHAT, {"type": "function", "function": {"name": "add"}}, ("add",)),
        (OPENAI_RESPONSES, {"type": "function", "name": "add"}, ("add",)),
        (ANTHROPIC, {"type": "any"}, ()),
        (ANTHROPIC, {"type": "tool", "name": "add"}, ("add",)),
        (ANTHROPIC, {"type": "auto"}, None),
    ],
)
def test_a_demanded_call_is_known(dialect, choice, tools):
    hello = {"input": "hi"} if dialect is OPENAI_RESPONSES else {"messages": CONVERSATION[1:2]}
    assert ask(dialect, **hello, tool_choice=choice).must_call == tools


@pytest.mark.parametrize(
    ("dialect", "body", "reason"),
    [
        (OPENAI_CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        (ANTHROPIC, {"messages": [], "max_tokens": 1}, "messages"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens"),
        (OPENAI_CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 17}, "n: .* 16"),
        (OPENAI_RESPONSES, {"input": [{"type": "computer_call"}]}, "computer_call"),
        (OPENAI_RESPONSES, {"input": [{"id": "msg_7"}]}, r"input\.0: .*has no content"),
        (OPENAI_RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}, "has no name"),
        (OPENAI_CHAT, {"messages": [{"role": "user", "contents": "hi"}]}, "'user' has no content"),
        (OPENAI_CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'text' has no text"),
        (OPENAI_CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "tool_calls"),
        (OPENAI_CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "audio"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'text' has no text"),
        (ANTHROPIC, {"messages": [{"role": "user", "content": RESULTS}]}, "'tool_result' come first"),
        (
            GOOGLE,
            {"contents": [{"parts": [{"executableCode": {"code": "1"}}]}]},
            "executableCode is not read",
        ),
        (GOOGLE, {"contents": [{"role": "model", "parts": [{"executableCode": {}}]}]}, "executableCode"),
        (GOOGLE, {"contents": [{"role": "model", "parts": [IMAGE]}]}, "has shown no image"),
        (GOOGLE, {"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]}, "has no text"),
        (OPENAI_RESPONSES, {"input": "hi", "tools": [{"type": "function"}]}, "has no name"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(dialect, body, reason):
    with pytest.raises(RefusedError, match=reason) as refused:
        ask(dialect, **body)
    assert refused.value.status == 400


def test_chat_answer_has_no_null_where_clients_read():
    """trae-agent dies of a prompt_tokens_details that is null."""
    body = OPENAI_CHAT.body(ASK, CALLING)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [AS_JSON],
    }  # fmt: skip
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert OPENAI_CHAT.body(ASK, reply(content=""))["choices"][0]["message"]["content"] == ""


def test_chat_stream_says_what_the_whole_answer_says():
    asked = ask(
        OPENAI_CHAT, messages=[{"role": "user", "content": "a"}], stream_options={"include_usage": True}
    )
    what = reply(content="text", reasoning="hm", tool_calls=(CALL,), finish="tool_calls")
    *chunks, last, usage = events(OPENAI_CHAT, what, asked)
    merged: dict = {}
    for chunk in chunks:
        merged |= chunk["choices"][0]["delta"]
    assert merged == {
        "role": "assistant", "content": "text", "reasoning_content": "hm",
        "tool_calls": [{"index": 0, **AS_JSON}],
    }  # fmt: skip
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 8)
    assert "usage" not in events(OPENAI_CHAT, what)[-1]  # nobody asked


def test_anthropic_shows_thinking_only_to_who_asked_for_it():
    asked = ask(ANTHROPIC, messages=[{"role": "user", "content": "a"}], thinking={"type": "enabled"})
    plain = ask(ANTHROPIC, messages=[{"role": "user", "content": "a"}])
    assert [block["type"] for block in ANTHROPIC.body(asked, CALLING)["content"]] == ["thinking", "tool_use"]
    body = ANTHROPIC.body(plain, CALLING)
    assert body["content"] == [
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 40, "b": 2}}
    ]
    assert (body["stop_reason"], body["usage"]["input_tokens"]) == ("tool_use", 5)


def test_anthropic_stream_says_what_the_whole_answer_says():
    asked = ask(ANTHROPIC, messages=[{"role": "user", "content": "a"}], thinking={"type": "enabled"})
    what = reply(content="text", reasoning="hm", tool_calls=(CALL,), finish="tool_calls")
    found = events(ANTHROPIC, what, asked)
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert found[0]["message"]["usage"]["input_tokens"] == 5
    blocks: list[dict] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"], json=""))
            case "content_block_delta":
                for name, value in event["delta"].items():
                    if name != "type":
                        key = {"partial_json": "json"}.get(name, name)
                        blocks[event["index"]][key] += value
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    assert blocks == ANTHROPIC.body(asked, what)["content"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_arguments_that_are_no_json_reach_an_anthropic_client_as_they_are():
    broken = reply(tool_calls=(ToolCall("c", "add", "{a: 1"),), finish="tool_calls", content="")
    assert ANTHROPIC.body(ASK, broken)["content"][0]["input"] == {"malformed_arguments": "{a: 1"}
    shown = OPENAI_CHAT.body(ASK, broken)["choices"][0]["message"]
    assert shown["tool_calls"][0]["function"]["arguments"] == "{a: 1"


def test_google_stream_says_what_the_whole_answer_says_and_reads_it_again():
    asked = ask(
        GOOGLE,
        contents=[{"parts": [{"text": "a"}]}],
        generationConfig={"thinkingConfig": {"includeThoughts": True}},
    )
    what = reply(content="text", reasoning="hm", tool_calls=(CALL,), finish="tool_calls")
    body = GOOGLE.body(asked, what)
    assert events(GOOGLE, what, asked) == [body]
    [candidate] = body["candidates"]
    assert (candidate["finishReason"], body["usageMetadata"]["totalTokenCount"]) == ("STOP", 8)
    [message] = ask(GOOGLE, contents=[candidate["content"]]).messages
    assert message == {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "hm",
        "tool_calls": [AS_JSON],
    }
    shown = GOOGLE.body(ask(GOOGLE, contents=[{"parts": [{"text": "a"}]}]), what)["candidates"][0]
    assert not any(part.get("thought") for part in shown["content"]["parts"])


def test_google_answers_without_ids_belong_to_the_calls_of_their_names_in_order():
    def called(name):
        return {"functionCall": {"name": name, "args": {}}}

    def answered(name, response):
        return {"functionResponse": {"name": name, "response": response}}

    _, *results = ask(
        GOOGLE,
        contents=[
            {"role": "model", "parts": [called("a"), called("b"), called("a")]},
            {
                "role": "user",
                "parts": [
                    answered("b", {"error": "no"}),
                    answered("a", {"n": 1}),
                    answered("a", {"result": 7}),
                ],
            },
        ],
    ).messages
    ids = [(result["tool_call_id"], result["content"]) for result in results]
    assert ids == [("call_0_1", "Error: no"), ("call_0_0", '{"n": 1}'), ("call_0_2", "7")]


def test_google_names_what_it_demands():
    hello = [{"parts": [{"text": "hi"}]}]
    config = {
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT"},
        "candidateCount": 2,
    }
    asked = ask(
        GOOGLE,
        contents=hello,
        generationConfig=config,
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
    )
    assert asked.unmeetable == ("response_mime_type", "response_schema")
    assert (asked.choices, asked.must_call) == (2, ("add",))


def test_responses_stream_says_what_the_whole_answer_says():
    what = reply(content="text", reasoning="hm", tool_calls=(CALL,), finish="tool_calls")
    found = events(OPENAI_RESPONSES, what)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found][:2] == ["response.created", "response.in_progress"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert found[-1]["response"] == OPENAI_RESPONSES.body(ASK, what)
    assert found[-1]["response"]["output"] == done
    assert found[-1]["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("dialect", "where", "word"),
    [
        (OPENAI_CHAT, lambda body: body["choices"][0]["finish_reason"], "length"),
        (ANTHROPIC, lambda body: body["stop_reason"], "max_tokens"),
        (OPENAI_RESPONSES, lambda body: body["incomplete_details"]["reason"], "max_output_tokens"),
        (GOOGLE, lambda body: body["candidates"][0]["finishReason"], "MAX_TOKENS"),
    ],
)
def test_an_answer_that_was_cut_off_says_so(dialect, where, word):
    assert where(dialect.body(ASK, reply(finish="length"))) == word


def test_pins_hold_and_what_they_changed_is_told():
    own = Sampling(temperature=1.0, top_p=0.9, max_new_tokens=10)
    asked = {"temperature": 0.2, "top_p": 0.9, "top_k": -1, "max_new_tokens": 64_000}
    sampling, lost = pinned(own, asked, ("temperature", "top_p", "top_k"))
    assert sampling == own
    assert lost == {"temperature": (0.2, 1.0), "max_new_tokens": (64_000, 10)}
    free, lost = pinned(own, {**asked, "max_new_tokens": 4}, ("top_p",))
    assert (free.temperature, free.max_new_tokens, lost) == (0.2, 4, {})
    assert [pinned(own, {"temperature": t}, ())[0].temperature for t in (1e-40, 0.01)] == [0, 0.01]


def test_hook_lets_pass_changes_and_denies_calls():
    def hook(call: ToolCall) -> ToolCall | str:
        return {"add": call, "run": ToolCall(call.id, "run", "{}")}.get(call.name, f"no {call.name} here")

    calls = [CALL, ToolCall("2", "run", '{"rm": 1}'), ToolCall("3", "grade", "{}")]
    assert passed(hook, calls) == ((CALL, ToolCall("2", "run", "{}")), ["no grade here"])
    assert passed(None, calls) == (tuple(calls), [])
    with pytest.raises(ToolHookError, match="returned None"):
        passed(lambda call: None, calls)
    with pytest.raises(ToolHookError, match=r"ZeroDivisionError.*'add'"):
        passed(lambda call: 1 // 0, calls)
