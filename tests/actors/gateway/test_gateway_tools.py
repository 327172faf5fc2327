"""Tool calls through the gateway: shown in each API's way, and one strand however they come back."""

import json
import sys

import pytest

from actors.gateway.dialects import openai_responses
from tests.actors.gateway.request_bodies import TOOL, WRITTEN, answering
from tests.actors.gateway.served import TOKENIZER, Served, encoded, served

ASKED = {"role": "user", "content": "40+2?"}


def assert_one_strand(s: Served) -> None:
    """Both answers are in one trajectory, as they were sampled."""
    [trajectory] = s.policy.trajectories(1.0)
    sampled = [trajectory.token_ids[turn.start : turn.stop].tolist() for turn in trajectory.turns]
    end = encoded("<|im_end|>")
    assert sampled == [encoded(f"I add.{WRITTEN}") + end, encoded("42") + end]


@pytest.mark.parametrize("spaces", [(", ", ": "), (",", ":"), (" , ", " : ")])
async def test_chat_client_that_writes_arguments_its_own_way_stays_on_one_strand(spaces):
    async with served(answering) as s:
        _, first = await s.post("/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL]})
        [choice] = first["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "I add.")
        assert json.loads(call["function"]["arguments"]) == {"a": 40, "b": 2}
        arguments = json.dumps({"b": 2, "a": 40}, separators=spaces)
        again = {**call, "function": {"name": "add", "arguments": arguments}}
        messages = [
            ASKED,
            {"role": "assistant", "content": "I add.", "tool_calls": [again]},
            {"role": "tool", "tool_call_id": call["id"], "content": "42"},
        ]
        _, second = await s.post("/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
        assert second["choices"][0]["message"]["content"] == "42"
        assert_one_strand(s)


async def test_anthropic_client_calls_a_tool_on_one_strand():
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    async with served(answering) as s:
        _, first = await s.post("/v1/messages", {"messages": [ASKED], "tools": tools, "max_tokens": 500})
        text, call = first["content"]
        assert (text["text"], call["input"], first["stop_reason"]) == (
            "I add.",
            {"a": 40, "b": 2},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
        messages = [
            ASKED,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        _, second = await s.post("/v1/messages", {"messages": messages, "tools": tools, "max_tokens": 500})
        assert second["content"] == [{"type": "text", "text": "42"}]
        assert_one_strand(s)


async def test_responses_client_calls_a_tool_on_one_strand():
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    async with served(answering) as s:
        _, first = await s.post("/v1/responses", {"input": [ASKED], "tools": tools})
        message, call = first["output"]
        assert (message["content"][0]["text"], json.loads(call["arguments"])) == ("I add.", {"a": 40, "b": 2})
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        items = [ASKED, *first["output"], output]
        _, second = await s.post("/v1/responses", {"input": items, "tools": tools})
        assert second["output"][0]["content"][0]["text"] == "42"
        assert_one_strand(s)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_gone_on_from_by_its_id_on_one_strand(stream):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    async with served(answering) as s:
        path = "/v1/responses"
        if stream:
            body = json.dumps({"input": "40+2?", "tools": tools, "stream": True})
            async with s.http.post(s.url + path, data=body) as events:
                first = json.loads((await events.text()).split("data: ")[-1])["response"]
        else:
            _, first = await s.post(path, {"input": "40+2?", "tools": tools})
        call = first["output"][-1]
        new = [{"type": "function_call_output", "call_id": call["call_id"], "output": "42"}]
        goes_on = {"input": new, "tools": tools, "previous_response_id": first["id"]}
        _, second = await s.post(path, {**goes_on, "store": None})  # which is as if it were left out
        assert second["output"][0]["content"][0]["text"] == "42"
        assert_one_strand(s)
        _, third = await s.post(path, {"input": "and?", "previous_response_id": second["id"], "store": False})
        assert "user and?" in TOKENIZER.decode(list(s.engine.requests[-1].token_ids))
        for unknown in (third["id"], "resp_1"):  # what was not to be stored, and what never was
            status, refusal = await s.post(path, {"input": "x", "previous_response_id": unknown})
            assert (status, refusal["error"]["code"]) == (404, "previous_response_not_found")


async def test_responses_are_added_to_a_conversation_once():
    async with served(lambda _: "yes") as s:
        path, first = "/v1/responses", [{"role": "developer", "content": "be brief"}]
        _, begun = await s.post("/v1/conversations", {"items": first})
        for text, named in (("one?", begun["id"]), ("two?", {"id": begun["id"]})):
            for _ in range(2):  # the second is a retry
                body = json.dumps({"input": text, "conversation": named})
                async with s.http.post(s.url + path, data=body, headers={"Idempotency-Key": text}) as answer:
                    assert answer.status == 200, await answer.text()
        assert len(s.engine.requests) == 2
        asked = TOKENIZER.decode(list(s.engine.requests[-1].token_ids))
        assert [asked.count(part) for part in ("be brief", "one?", "yes", "two?")] == [1, 1, 1, 1]
        status, refusal = await s.post(path, {"input": "x", "conversation": "conv_1"})
        assert (status, refusal["error"]["code"]) == (404, "conversation_not_found")
        both = {"input": "x", "conversation": begun["id"], "previous_response_id": "resp_1"}
        assert (await s.post(path, both))[0] == 400


async def test_a_retry_is_answered_although_what_it_goes_on_from_is_no_longer_kept(monkeypatch):
    monkeypatch.setattr(openai_responses, "MOST_KEPT", 2)
    async with served(lambda _: "yes") as s:
        _, first = await s.post("/v1/responses", {"input": "1?"})
        body, key = json.dumps({"input": "2?", "previous_response_id": first["id"]}), {"Idempotency-Key": "k"}
        answers = []
        for _ in range(2):
            async with s.http.post(s.url + "/v1/responses", data=body, headers=key) as answer:
                answers.append((answer.status, (await answer.json())["id"]))
            for n in range(2):
                await s.post("/v1/responses", {"input": f"other {n}?"})
        assert answers[0] == answers[1] == (200, answers[0][1])


async def test_the_latest_answers_alone_are_kept(monkeypatch):
    monkeypatch.setattr(openai_responses, "MOST_KEPT", 2)
    async with served(lambda _: "yes") as s:
        ids = [(await s.post("/v1/responses", {"input": f"{n}?"}))[1]["id"] for n in range(3)]
        for earlier, status in ((ids[1], 200), (ids[2], 200), (ids[0], 404)):
            assert (await s.post("/v1/responses", {"input": "?", "previous_response_id": earlier}))[
                0
            ] == status


async def test_responses_share_what_they_go_on_from_and_one_may_go_on_from_any():
    async with served(lambda _: "yes") as s:
        path, earlier, ids = "/v1/responses", None, []
        for n in range(9):
            _, answer = await s.post(path, {"input": f"{n}? " + "x" * 500, "previous_response_id": earlier})
            ids.append(earlier := answer["id"])
        assert 9 * 500 < s.session.responses.size_bytes < 2 * 9 * 500
        said = {"role": "assistant", "content": " and no"}
        for name, turns in ((ids[-1], 9), (ids[1], 2), (ids[1], 2)):  # the newest, and twice an old one
            new = [said, {"content": "sure?"}]
            await s.post(path, {"input": new, "previous_response_id": name, "store": False})
            prompt = TOKENIZER.decode(list(s.engine.requests[-1].token_ids))
            assert [prompt.count(f"{n}? x") for n in range(9)] == [1] * turns + [0] * (9 - turns)
            assert (prompt.count("yes"), prompt.count("yes and no")) == (turns, 1)


async def test_what_is_kept_of_responses_is_bounded_whatever_else_their_requests_bring():
    long = [{"content": "again?" * 200, "left_out": [[]] * 300}]  # what nobody reads is not kept
    async with served(lambda _: "yes", most_body_bytes=4096) as s:
        path, earlier, statuses = "/v1/responses", None, []
        for _ in range(3):
            status, answer = await s.post(path, {"input": long, "previous_response_id": earlier})
            statuses.append(status)
            earlier = answer.get("id", earlier)
        assert statuses == [200, 200, 413]
        assert "raise actors.environment.gateway.most_body_bytes" in answer["error"]["message"]
        assert 0 < s.session.responses.size_bytes <= 4096


async def test_stop_text_ends_the_answer_before_it():
    """smolagents stops before its observations."""
    async with served(lambda _: "I think.Observation: 7") as s:
        _, answer = await s.chat("hi", stop=["Observation:"])
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("I think.", "stop")
        await s.chat("hi", "I think.", "go on", stop=["Observation:"])
        [trajectory] = s.policy.trajectories(1.0)
        assert [turn.stop - turn.start for turn in trajectory.turns] == [len("I think.Observation:")] * 2


async def test_tools_that_were_not_declared_are_not_looked_for():
    async with served(answering) as s:
        _, answer = await s.chat("40+2?", tools=[], parallel_tool_calls=True)
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["message"]["content"] == f"I add.{WRITTEN}"


async def test_hook_denies_a_call_before_the_agent_sees_it(tmp_path, monkeypatch):
    (tmp_path / "gateway_hook.py").write_text("def deny(call): return f'{call.name} is not allowed'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with served(answering, tool_hook="gateway_hook:deny") as s:
        _, answer = await s.post("/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL]})
        [choice] = answer["choices"]
        assert choice["message"]["content"] == "I add.\nadd is not allowed"
        assert ("tool_calls" in choice["message"], choice["finish_reason"]) == (False, "stop")
        [trajectory] = s.policy.trajectories(1.0)
        assert trajectory.token_ids[trajectory.turns[0].start : -1].tolist() == encoded(f"I add.{WRITTEN}")
    sys.modules.pop("gateway_hook")


async def test_hook_that_raises_costs_the_episode_and_not_the_server(tmp_path, monkeypatch):
    (tmp_path / "broken_hook.py").write_text("def deny(call): return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with served(answering, tool_hook="broken_hook:deny") as s:
        status, answer = await s.post("/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL]})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in str(s.session.failure)
        assert (await s.chat("hi"))[0] == 200
    sys.modules.pop("broken_hook")


@pytest.mark.parametrize("raised", ["ZeroDivisionError", "FileNotFoundError", "ConnectionRefusedError"])
async def test_hook_that_raises_for_one_call_costs_that_request_unless_the_host_fails(
    tmp_path, monkeypatch, raised
):
    """Else an agent with a shell could end its episode by such a call, and have it left out of training."""
    hook = f"def deny(call):\n    if '-1' in call.arguments: raise {raised}\n    return call\n"
    name = f"picky_hook_{raised}"
    (tmp_path / f"{name}.py").write_text(hook)
    monkeypatch.syspath_prepend(str(tmp_path))
    call = '<tool_call>{"name": "add", "arguments": {"a": -1}}</tool_call>'
    async with served(lambda text: call if "odd" in text else answering(text), tool_hook=f"{name}:deny") as s:
        assert (await s.post("/v1/chat/completions", {"messages": [ASKED], "tools": [TOOL]}))[0] == 200
        odd = {"messages": [{"role": "user", "content": "odd"}], "tools": [TOOL]}
        status, answer = await s.post("/v1/chat/completions", odd)
        if raised == "ConnectionRefusedError":
            assert (status, raised in str(s.session.failure)) == (500, True)
        else:
            assert (status, s.session.failure) == (400, None)
            assert "the gateway failed on this request: ToolHookError" in answer["error"]["message"]
    sys.modules.pop(name)


async def test_agent_that_repeats_its_calls_as_text_forks_and_keeps_what_was_sampled():
    """smolagents sends the history of a ToolCallingAgent as text parts, as recorded here."""

    def text(role: str, words: str) -> dict:
        return {"role": role, "content": [{"type": "text", "text": words}]}

    begun = [text("system", "Call tools."), text("user", "New task:\n40+2?")]
    async with served(answering) as s:
        body = {"messages": begun, "tools": [TOOL], "tool_choice": "required"}
        _, first = await s.post("/v1/chat/completions", body)
        [call] = first["choices"][0]["message"]["tool_calls"]
        shown = {**call, "function": {"name": "add", "arguments": {"a": 40, "b": 2}}}
        history = [
            *begun,
            text("assistant", f"I add.\nCalling tools:\n[{shown}]"),
            text("user", "Observation:\ntool 42"),
        ]
        _, second = await s.post("/v1/chat/completions", {**body, "messages": history})
        assert second["choices"][0]["message"]["content"] == "42"
        one, other = s.policy.trajectories(1.0)
        end = encoded("<|im_end|>")
        assert one.token_ids[one.loss_mask].tolist() == encoded(f"I add.{WRITTEN}") + end
        assert other.token_ids[other.loss_mask].tolist() == encoded("42") + end
