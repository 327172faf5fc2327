"""Held-out prompts that a base model answers, which continues texts behind `/v1/completions`."""

from contextlib import asynccontextmanager
from copy import deepcopy

import pytest
from aiohttp import web
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.evaluation.engines import OwnEngine
from actors.evaluation.text_completions import chat_endpoints
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.evaluation import ChatEndpointConfig
from actors.settings.tool_chat import ToolsConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import EngineError, RequestRefusedError
from storage.weights.blob_sources import Blobs
from tests.actors.evaluation.asked_sets import ask
from tests.actors.held_out import SAMPLED, Recording, published
from tests.actors.policy.families import FAMILIES

QWEN = FAMILIES["qwen3"].tokenizer
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]


@asynccontextmanager
async def served(reply, asked):
    """A server of completions alone; `reply` makes a choice of a request."""

    async def complete(request):
        asked.append(body := await request.json())
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None, **reply(body)}
        return web.json_response(
            {"object": "text_completion", "choices": [choice], "usage": {"completion_tokens": 2}}
        )

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def endpoint(url, **more):
    config = ChatEndpointConfig(url=url, model="base", attempts=1, protocol="completions", **more)
    return chat_endpoints({"base": config}, QWEN, "auto")["base"]


@pytest.mark.nats
@pytest.mark.usefixtures("quick")
async def test_a_data_set_is_measured_on_a_base_model_that_answers_no_chats(bus, evaluations, model):
    asked = []
    policy = ScriptedEngine(lambda _: [5] * 8, policy_version=0)
    await policy.start()
    async with served(lambda _: {"text": "so"}, asked) as url:
        own = OwnEngine(lambda: policy, Blobs(bus))
        async with evaluations.evaluator(own, Recording(), endpoints={"base": endpoint(url)}):
            await ask(bus, await published(bus, 3, model), data_set="base", answered_by="base")
            result = await evaluations.result()
            assert (result.policy_version, result.failed) == (3, 0)
    assert not policy.requests
    assert {(body["model"], body["max_tokens"]) for body in asked} == {("base", SAMPLED.max_new_tokens)}
    assert not any("messages" in body for body in asked)


async def test_the_prompt_is_what_the_policy_sees_and_the_answer_is_taken_apart_as_its_are():
    asked = []
    async with served(
        lambda _: {"text": "<think>\nhm\n</think>\n\n2", "finish_reason": "length"}, asked
    ) as url:
        answering = endpoint(url, stop=("\n\nQ:",))
        reply = await answering.chat(CHAT, None, SAMPLED)
        await answering.close()
    [body] = asked
    assert body["prompt"] == QWEN.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert body["stop"] == ["\n\nQ:"]
    assert (reply.content, reply.reasoning, reply.finish_reason) == ("2", "hm", "length")
    assert answering.tokens_generated == 2


async def test_the_first_token_that_a_server_adds_by_itself_is_not_sent_as_text():
    """vLLM, SGLang and llama.cpp put it before each text, where templates such as Llama's write it too."""
    tokenizer = deepcopy(QWEN)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.chat_template = "{{ bos_token }}" + QWEN.chat_template
    first = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|begin|> $A", None, [("<|begin|>", first)])
    asked = []
    async with served(lambda _: {"text": "2"}, asked) as url:
        config = ChatEndpointConfig(url=url, model="base", attempts=1, protocol="completions")
        answering = chat_endpoints({"base": config}, tokenizer, "auto")["base"]
        await answering.chat(CHAT, None, SAMPLED)
        await answering.close()
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(asked[0]["prompt"]) == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.encode(asked[0]["prompt"]).count(first) == 1


async def test_a_prompt_of_text_has_the_contents_alone_and_the_answer_stays_as_it_is():
    asked = []
    async with served(lambda _: {"text": " 2 <think>"}, asked) as url:
        answering = endpoint(url, prompt="text")
        reply = await answering.chat(CHAT, None, SAMPLED)
        with pytest.raises(RequestRefusedError, match=r'endpoints\.base\.prompt="template"'):
            await answering.chat(CHAT, [{"type": "function", "function": {"name": "f"}}], SAMPLED)
        await answering.close()
    assert [body["prompt"] for body in asked] == ["Add.\n\n1+1="]
    assert "stop" not in asked[0]
    assert (reply.content, reply.reasoning, reply.tool_calls) == (" 2 <think>", None, ())


async def test_a_base_model_may_call_tools_as_the_template_shows_them():
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
    asked = []
    environment = build_environment(ToolsConfig(type="tools", tools=({"type": "calculator"},)))
    async with served(
        lambda body: {"text": "42" if "<tool_response>" in body["prompt"] else call}, asked
    ) as url:
        answering = endpoint(url)
        policy = Policy(answering, QWEN, SAMPLED)
        episode = await environment.run(Task(task_id="t", prompt="6*7", label="42"), policy)
        await answering.close()
    assert "calculator" in asked[0]["prompt"]
    assert asked[1]["prompt"].startswith(asked[0]["prompt"])
    assert {part.reward for part in episode.trajectories} == {1.0}
    assert not any(part.trainable for part in episode.trajectories)


async def test_an_answer_without_a_text_is_none():
    async with served(lambda _: {"message": {"content": "a chat"}}, []) as url:
        answering = endpoint(url)
        with pytest.raises(EngineError, match="base answered no completion of /completions"):
            await answering.chat(CHAT, None, SAMPLED)
        await answering.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stop": ["Q:"]}, 'set protocol="completions"'),
        ({"prompt": "text"}, 'set protocol="completions"'),
        ({"url": "http://a/v1/completions", "protocol": "completions"}, "leave out /completions"),
        ({"url": "http://a/v1/chat/completions"}, "leave out /chat/completions"),
        ({"stop": ["a"] * 5, "protocol": "completions"}, "at most 4"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(more, words):
    given = {"url": "http://a/v1", "model": "base", **more}
    with pytest.raises(ValidationError, match=words):
        ActorsConfig.model_validate({"evaluation": {"endpoints": {"base": given}}})
