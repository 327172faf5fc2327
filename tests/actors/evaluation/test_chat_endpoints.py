"""Held-out prompts that a model behind an OpenAI-compatible endpoint answers, whatever serves it."""

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from pydantic import ValidationError
from structlog.testing import capture_logs

from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.evaluation.chat_endpoint import ChatEndpoint
from actors.evaluation.engines import OwnEngine
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.evaluation import ChatEndpointConfig
from actors.settings.tool_chat import ToolsConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, EngineError, RequestRefusedError
from storage.weights.blob_sources import Blobs
from tests.actors.evaluation.asked_sets import ask
from tests.actors.held_out import SAMPLED, TOKENIZER, Recording, published

ASKED = 3
"""Prompts of a data set that `ask` asks for."""
pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "6*7"}'},
}


@asynccontextmanager
async def served(reply, asked, ending="stop"):
    """A server of chat completions; `reply` makes a message, or a status, of a request."""

    async def complete(request):
        body = await request.json()
        asked.append((request.headers.get("Authorization"), body))
        if isinstance(found := reply(body), int):
            return web.json_response({"error": "no such model"}, status=found)
        choice = {"index": 0, "message": {"role": "assistant", **found}, "finish_reason": ending}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 3}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def endpoint(url, **more):
    return ChatEndpoint("base", ChatEndpointConfig(url=url, model="large", attempts=1, **more))


async def test_a_data_set_is_measured_on_a_model_whose_texts_alone_are_known(
    bus, evaluations, model, monkeypatch
):
    asked = []
    monkeypatch.setenv("BASE_KEY", "secret")
    policy = ScriptedEngine(lambda _: [5] * 8, policy_version=0)
    await policy.start()
    async with served(lambda _: {"content": "so"}, asked) as url:
        answering = {"base": endpoint(url, key_variable="BASE_KEY")}
        own = OwnEngine(lambda: policy, Blobs(bus))
        async with evaluations.evaluator(own, Recording(), endpoints=answering):
            for version in (3, 4):
                await ask(bus, await published(bus, version, model), data_set="base", answered_by="base")
                result = await evaluations.result()
                assert (result.policy_version, result.drawn_by) == (version, (version, version))
                assert result.failed == 0
    assert len(asked) == 2 * ASKED, "it is measured once"
    assert not policy.requests
    assert {key for key, _ in asked} == {"Bearer secret"}
    assert sorted(body["temperature"] for _, body in asked) == [0.0] * ASKED + [1.0] * ASKED
    assert {(body["model"], body["max_tokens"]) for _, body in asked} == {("large", SAMPLED.max_new_tokens)}
    assert "top_k" not in asked[0][1]


async def test_tools_and_several_turns_go_to_the_endpoint_and_are_recorded_untrained():
    def reply(body):
        done = body["messages"][-1]["role"] == "tool"
        return (
            {"content": body["messages"][-1]["content"]} if done else {"content": None, "tool_calls": [CALL]}
        )

    asked = []
    environment = build_environment(ToolsConfig(type="tools", tools=({"type": "calculator"},)))
    async with served(reply, asked) as url:
        answering = endpoint(url)
        policy = Policy(answering, TOKENIZER, SAMPLED)
        episode = await environment.run(Task(task_id="t", prompt="6*7", label="42"), policy)
        await answering.close()
    assert [message["role"] for message in asked[1][1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1][1]["messages"][1]["tool_calls"] == [CALL]
    assert asked[0][1]["tools"][0]["function"]["name"] == "calculator"
    assert {part.reward for part in episode.trajectories} == {1.0}
    assert not any(part.trainable for part in episode.trajectories)
    assert answering.tokens_generated == 6


PARTS = [
    {"type": "thinking", "thinking": "hm"},
    {"type": "text", "text": "6*"},
    {"type": "text", "text": "7"},
]


async def test_other_servers_forms_of_an_answer_are_read():
    """Magistral's content is a list of parts, vLLM names the reasoning `reasoning`, Ollama's arguments are an
    object."""
    called = {"name": "calculator", "arguments": {"expression": "6*7"}}
    message = {"content": PARTS, "reasoning": "so", "tool_calls": [{"id": "c1", "function": called}]}
    async with served(lambda _: message, []) as url:
        answering = endpoint(url)
        reply = await answering.chat([{"role": "user", "content": "6*7"}], None, SAMPLED)
        await answering.close()
    assert (reply.content, reply.reasoning) == ("6*7", "so")
    assert reply.tool_calls == (("c1", "calculator", '{"expression": "6*7"}'),)


@pytest.mark.parametrize("ending", ["abort", "error"])
async def test_an_answer_that_a_server_gave_up_is_an_error_and_not_measured(ending):
    async with served(lambda _: {"content": "4"}, [], ending) as url:
        answering = endpoint(url)
        with pytest.raises(EngineError, match=f"broke the answer off: its finish_reason is '{ending}'"):
            await answering.chat([{"role": "user", "content": "6*7"}], None, SAMPLED)
        await answering.close()


async def test_what_an_endpoint_refuses_is_said_and_not_measured(bus, evaluations, model):
    async with served(lambda _: 404, []) as url:
        own = OwnEngine(lambda: ScriptedEngine(lambda _: [5] * 8, policy_version=0), Blobs(bus))
        with capture_logs() as logs:
            async with evaluations.evaluator(own, Recording(), endpoints={"base": endpoint(url)}):
                await ask(bus, await published(bus, 3, model), data_set="base", answered_by="base")
                await evaluations.settled()
    reasons = {entry["reason"] for entry in logs if entry["event"] == "evaluation_rollout_failed"}
    [reason] = reasons
    assert "evaluation endpoint base: " in reason
    assert "refused the request, 404" in reason
    assert [entry["event"] for entry in logs].count("evaluation_skipped") == 1


async def test_an_environment_that_asks_for_tokens_is_told_that_an_endpoint_has_none():
    policy = Policy(endpoint("http://there/v1"), TOKENIZER, SAMPLED)
    with pytest.raises(RequestRefusedError, match=r"answers chats and takes no tokens.*actors\.opponents"):
        await policy.generate([1, 2])


def test_settings_of_endpoints_are_checked_at_the_start():
    for given in ({"url": "http://a/v1"}, {"model": "large"}):
        with pytest.raises(ValidationError, match="an endpoint needs both"):
            ActorsConfig.model_validate({"evaluation": {"endpoints": {"base": given}}})
    with pytest.raises(ConfigError, match="evaluation endpoint base: the environment variable NO_SUCH_KEY"):
        endpoint("http://there/v1", key_variable="NO_SUCH_KEY")
    assert json.loads(ChatEndpointConfig(url="http://a/v1", model="m").model_dump_json())["model"] == "m"
