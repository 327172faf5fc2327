"""Run by `test_gateway_clients.py` with the interpreter of an environment that has openai and anthropic.

It knows nothing of the gateway but the variables that every such program reads."""

import json

import anthropic
import openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ASKED = {"role": "user", "content": "40+2?"}


def chat(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    first = client.chat.completions.create(model="m", messages=[ASKED], tools=tools, max_tokens=64_000)
    [call] = first.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 40, "b": 2})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    messages = [ASKED, first.choices[0].message, result]
    with client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "42"
    plain = client.chat.completions.create(model="m", messages=[ASKED], tools=[], parallel_tool_calls=True)
    assert plain.choices[0].message.tool_calls is None


def responses(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    with client.responses.stream(model="m", input="40+2?", tools=tools) as stream:
        first = stream.get_final_response()
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"a": 40, "b": 2}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    second = client.responses.create(model="m", input=[ASKED, *first.output, output], tools=tools)
    assert second.output_text == "42"
    third = client.responses.create(model="m", input=[output], tools=tools, previous_response_id=first.id)
    assert third.output_text == "42"


def messages(client: anthropic.Anthropic) -> None:
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    counted = client.messages.count_tokens(model="m", messages=[ASKED], tools=tools)
    with client.messages.stream(model="m", messages=[ASKED], tools=tools, max_tokens=512) as stream:
        first = stream.get_final_message()
    assert first.usage.input_tokens == counted.input_tokens
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (call.input, first.stop_reason) == ({"a": 40, "b": 2}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
    history = [ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model="m", messages=history, tools=tools, max_tokens=512)
    assert second.content[0].text == "42"


def errors() -> None:
    for client, kind, end in ((openai.OpenAI(), openai, "/v1"), (anthropic.Anthropic(), anthropic, "")):
        assert [model.id for model in client.models.list()] == ["policy"]
        url = str(client.base_url).partition("/s/")[0] + end
        wrong = client.with_options(api_key="sk-wrong", base_url=url)
        try:
            wrong.models.list()
        except kind.AuthenticationError:
            continue
        raise AssertionError(f"{kind.__name__} took a wrong key")


errors()
chat(openai.OpenAI())
responses(openai.OpenAI())
messages(anthropic.Anthropic())
