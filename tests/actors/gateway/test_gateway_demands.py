"""What clients ask for besides an answer: given, or named as not given; and prompts that are too long."""

import asyncio
import json

import pytest

from actors.environments.session_episode import unscored_episode
from bus.errors import EngineError
from tests.actors.gateway.request_bodies import BODIES, CHAT, MESSAGES, RESPONSES, TOOL, answering
from tests.actors.gateway.served import TOKENIZER, chat_body, encoded, served, until

SCHEMA = {"type": "json_schema", "json_schema": {"name": "A", "schema": {"type": "object"}}}


async def test_each_choice_is_a_trajectory_of_its_own_and_its_log_probs_are_the_recorded_ones():
    async with served() as s:
        status, answer = await s.chat("hi", n=3, logprobs=True)
        assert (status, [choice["index"] for choice in answer["choices"]]) == (200, [0, 1, 2])
        recorded = s.policy.trajectories(0.0)
        assert [len(trajectory.turns) for trajectory in recorded] == [1, 1, 1]
        for choice, trajectory in zip(answer["choices"], recorded, strict=True):
            told = choice["logprobs"]["content"]
            assert [token["logprob"] for token in told] == pytest.approx(
                trajectory.behaviour_logprobs[trajectory.loss_mask].tolist()
            )
            assert "".join(token["token"] for token in told) == "fine<|im_end|>"
        assert len({request.sampling.seed for request in s.engine.requests}) == 3
        assert s.session.last.number == 0


async def test_choices_that_reached_nobody_or_pass_the_turn_limit_are_not_trained():
    async with served() as s:
        s.engine.hold()
        body = chat_body("hi", n=2)
        asking = asyncio.create_task(s.post(CHAT, body, x_stainless_retry_count="0"))
        await until(lambda: s.engine.running == 2, "both choices")
        asking.cancel()
        await asyncio.wait([asking])
        s.engine.release()
        await until(lambda: s.session.counts["turns"] == 2, "answers within the time for a retry")
        await s.session.close()
        assert [trajectory.is_trained for trajectory in s.policy.trajectories(0.0)] == [False, False]
    async with served(most_turns=3) as s:
        assert (await s.chat("hi", n=2))[0] == 200
        status, answer = await s.chat("hi", n=2)
        assert (status, answer["error"]["code"], len(s.engine.requests)) == (403, "turn_limit", 2)
    async with served(most_turns=3) as s:
        s.engine.hold()
        asking = asyncio.create_task(s.chat("hi", n=2))
        await until(lambda: s.engine.running == 2, "both choices")
        assert (await s.chat("hi", n=2))[0] == 403  # also while they are under way
        s.engine.release()
        assert (await asking)[0] == 200


async def test_choices_of_a_request_that_fails_are_not_trained():
    async with served() as s:
        begun, answered, chat = [], [], s.policy.chat

        async def first_alone(*given, **asked):
            begun.append(given)
            if len(begun) > 1:
                await until(lambda: answered, "the first choice")
                raise EngineError("the engine is gone")
            answered.append(await chat(*given, **asked))
            return answered[0]

        s.policy.chat = first_alone
        assert (await s.chat("hi", n=2))[0] == 503
        assert [trajectory.is_trained for trajectory in s.policy.trajectories(0.0)] == [False]


async def test_an_answer_that_the_client_has_begun_goes_on_and_its_beginning_is_not_trained():
    async with served(lambda prompt: "42." if prompt.endswith("It is ") else "no") as s:
        asked = {"role": "user", "content": "40+2?"}
        body = {"messages": [asked, {"role": "assistant", "content": "It is "}], "max_tokens": 9}
        _, answer = await s.post(MESSAGES, body)
        assert answer["content"][0]["text"] == "42."
        whole = {"role": "assistant", "content": "It is 42."}
        more = {"role": "user", "content": "sure?"}
        assert (await s.post(MESSAGES, {"messages": [asked, whole, more], "max_tokens": 9}))[0] == 200
        [trajectory] = s.policy.trajectories(1.0)  # one strand: the whole answer is known again
    trained = TOKENIZER.decode(trajectory.token_ids[trajectory.loss_mask].tolist())
    assert trained == "42.<|im_end|>no<|im_end|>"


async def test_stop_sequence_that_ended_an_answer_is_named():
    async with served(lambda _: "one END two") as s:
        _, answer = await s.post(MESSAGES, {**BODIES[MESSAGES], "max_tokens": 90, "stop_sequences": ["END"]})
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
        assert answer["content"][0]["text"] == "one "


@pytest.mark.parametrize(
    ("path", "demand", "name"),
    [
        (CHAT, {"response_format": SCHEMA}, "response_format"),
        (RESPONSES, {"text": {"format": SCHEMA}}, "text.format"),
    ],
)
async def test_a_schema_is_refused_by_name_or_named_as_not_heeded(path, demand, name):
    async with served() as s:
        status, answer = await s.post(path, {**BODIES[path], **demand})
        assert (status, s.engine.requests) == (400, [])
        assert answer["error"]["message"].startswith(f"{name}: ")
    async with (
        served(unmeetable="ignore") as s,
        s.http.post(s.url + path, json={**BODIES[path], **demand}) as ignored,
    ):
        assert (ignored.status, ignored.headers["X-Sluice-Unmet"]) == (200, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("calls", "unmet"), [(True, None), (False, "tool_choice")])
async def test_an_answer_says_that_it_has_not_the_call_that_was_demanded(calls, unmet, stream):
    async with served(answering if calls else lambda _: "no") as s:
        body = {**BODIES[CHAT], "tools": [TOOL], "tool_choice": "required", "stream": stream}
        async with s.http.post(s.url + CHAT, json=body) as answer:
            assert (answer.status, answer.headers.get("X-Sluice-Unmet")) == (200, unmet)
        assert s.session.counts["answers_without_demanded_call"] == (not calls)


SHORT = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
SEVERAL = {"parallel_tool_calls": False}
OTHERS = {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"function": {"name": "sub"}}]}}


@pytest.mark.parametrize(
    ("calls", "asked", "unmet"),
    [
        (1, SEVERAL, None),
        (2, SEVERAL, "parallel_tool_calls"),
        (0, OTHERS, None),
        (1, OTHERS, "tool_choice"),
        (1, {"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
async def test_an_answer_says_which_calls_it_should_not_have_and_what_nothing_heeded(calls, asked, unmet):
    body = {**BODIES[CHAT], "tools": [TOOL], **asked}
    async with served(lambda _: SHORT * calls or "no") as s, s.http.post(s.url + CHAT, json=body) as answer:
        assert (answer.status, answer.headers.get("X-Sluice-Unmet")) == (200, unmet)


async def test_an_answer_has_the_room_that_the_context_leaves():
    async with served(lambda _: "abcdefgh") as s:
        prompt = len(encoded("<|im_start|>user hi<|im_end|><|im_start|>assistant "))
        s.engine.longest_context = prompt + 5
        _, answer = await s.chat("hi")
        assert s.engine.requests[0].sampling.max_new_tokens == 5
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abcde", "length")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (CHAT, "maximum context length is 30 tokens"),
        (MESSAGES, "prompt is too long: "),
        (RESPONSES, "context_length_exceeded"),
    ],
)
async def test_too_long_a_prompt_reads_as_the_api_says_it_and_the_episode_says_why_it_ended(path, words):
    async with served() as s:
        await s.chat("hi")
        s.engine.longest_context = 30
        body = json.loads(json.dumps(BODIES[path]).replace('"hi"', f'"{"x" * 40}"'))
        status, answer = await s.post(path, body)
        assert (status, words in json.dumps(answer), s.session.end) == (400, True, "length")
        episode = unscored_episode(s.policy, s.session, 0.0, "nobody posted")
        assert "context of 30" in episode.trajectories[0].metadata["end_cause"]
        assert (await s.chat("hi"))[0] == 200  # it is shorter: the agent has compacted
        assert (s.session.end, s.session.end_cause) == (None, "")


async def test_codex_reads_in_its_stream_that_a_prompt_is_too_long():
    """It gives up on a status, and shortens its history on this event."""
    async with served() as s:
        s.engine.longest_context = 9
        async with s.http.post(s.url + RESPONSES, json={**BODIES[RESPONSES], "stream": True}) as answer:
            [name, data] = (await answer.text()).strip().split("\n")
        response = json.loads(data.removeprefix("data: "))["response"]
        assert (answer.status, name) == (200, "event: response.failed")
        assert (response["status"], response["error"]["code"]) == ("failed", "context_length_exceeded")
        assert (await s.post(CHAT, chat_body("hi", stream=True)))[0] == 400
