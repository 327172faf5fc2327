"""The gateway over real HTTP: sessions, retries, refusals, caps, disconnects, streams."""

import asyncio
import gzip
import json
import socket

import aiohttp
import pytest

from actors.environments.session_episode import posted_episode
from actors.gateway.posted_reward import PostedReward
from actors.gateway.server import Gateway
from actors.settings.gateway import GatewayConfig
from bus.errors import ConfigError, EngineError
from tests.actors.gateway.request_bodies import BODIES, CHAT, GENERATE, HELLO, MESSAGES, RESPONSES
from tests.actors.gateway.served import chat_body, served, until

STREAM = GENERATE.replace("generate", "streamGenerate") + "?alt=sse"
BODIES[GENERATE] = BODIES[STREAM] = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def test_conversation_is_one_trajectory_of_exactly_the_sampled_tokens():
    async with served(lambda prompt: str(prompt.count("user"))) as s:
        status, first = await s.chat("how many?")
        assert (status, first["choices"][0]["message"]["content"]) == (200, "1")
        _, second = await s.chat("how many?", "1", "and now?")
        assert second["choices"][0]["message"]["content"] == "2"
        [trajectory] = s.policy.trajectories(1.0)
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "stop"]
    assert trajectory.loss_mask.sum() == 4  # "1", "2" and what ends each
    assert second["usage"]["prompt_tokens"] == trajectory.turns[1].start


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, GENERATE])
@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "x-goog-api-key", "X-Session-ID"])
async def test_session_is_found_by_key_or_header_without_its_url(path, header):
    async with served() as s:
        key = f"Bearer {s.session.key}" if header == "Authorization" else s.session.key
        async with s.http.post(s.gateway.url + path, json=BODIES[path], headers={header: key}) as answer:
            assert answer.status == 200
        assert len(s.engine.requests) == 1


async def test_a_frameworks_own_session_id_does_not_hide_the_api_key():
    async with served() as s:
        headers = {"X-Session-ID": "rollout-7", "Authorization": f"Bearer {s.session.key}"}
        async with s.http.post(s.gateway.url + CHAT, json=HELLO, headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CHAT, "invalid_request_error"),
        (MESSAGES, "authentication_error"),
        (RESPONSES, "invalid_request_error"),
        (GENERATE, None),
    ],
)
async def test_unknown_key_is_refused_in_the_apis_own_shape(path, kind):
    async with served() as s:
        headers = {"Authorization": "Bearer sk-other"}
        async with s.http.post(s.gateway.url + path, json=BODIES[path], headers=headers) as answer:
            assert (answer.status, answer.headers["x-should-retry"]) == (401, "false")
            error = (await answer.json())["error"]
            assert (error.get("type"), error.get("status")) == (kind, None if kind else "UNAUTHENTICATED")
        async with s.http.post(f"{s.gateway.url}/s/{'x' * 32}{path}", json=BODIES[path]) as answer:
            assert answer.status == 404
        async with s.http.post(s.gateway.url + "/v1/embeddings", json={}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "no_such_path")
        assert s.engine.requests == []


async def test_closed_session_says_that_it_is_closed():
    async with served() as s:
        url = s.url
        await s.gateway._close(s.session)
        async with s.http.post(url + MESSAGES, json=BODIES[MESSAGES]) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (403, "permission_error")


BAD = {
    "no JSON": b"{",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "deep": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "no messages": b'{"messages": []}',
    "text as temperature": b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "unknown role": b'{"messages": [{"role": "god", "content": "a"}]}',
    "a picture": b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    "no answer": b'{"messages": [{"role": "user", "content": "a"}], "n": 0}',
}


EMPTY = {"role": "user", "parts": []}
FILE = {"role": "user", "parts": [{"fileData": {"fileUri": "gs://a", "mimeType": "image/png"}}]}


@pytest.mark.parametrize(("content", "said"), [(EMPTY, "no message"), (FILE, "fileData")])
async def test_a_request_of_google_without_a_word_or_with_a_file_is_refused_by_name(content, said):
    async with served() as s:
        status, answer = await s.post(GENERATE, {"contents": [content]})
        assert (status, said in answer["error"]["message"], s.engine.requests) == (400, True, [])


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
async def test_malformed_request_is_refused_and_changes_nothing(raw):
    async with served() as s:
        status, answer = await s.post(CHAT, raw)
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        status, _ = await s.chat("hi")
        assert (status, len(s.engine.requests), s.session.failure) == (200, 1, None)


async def test_large_body_is_refused():
    async with served(most_body_bytes=2048) as s:
        status, answer = await s.chat("x" * 4096)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "raise actors.environment.gateway.most_body_bytes" in answer["error"]["message"]
        assert (await s.chat("hi"))[0] == 200


async def test_a_body_that_is_not_packed_as_it_says_is_refused_by_name():
    async with served() as s:
        packed = gzip.compress(json.dumps(HELLO).encode())
        assert (await s.post(CHAT, packed, Content_Encoding="gzip"))[0] == 200
        status, answer = await s.post(CHAT, b"{}", Content_Encoding="gzip")
        assert (status, "Content-Encoding" in answer["error"]["message"]) == (400, True)


async def test_body_that_does_not_come_is_given_up():
    async with served(body_timeout_s=0.05) as s:
        url = s.gateway.url.removeprefix("http://")
        host, port = url.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /s/{s.session.key}{CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\n".encode()
        )
        assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"408"
        writer.close()


async def test_turn_limit_ends_the_session_and_not_the_connection():
    async with served(most_turns=1) as s:
        assert (await s.chat("hi"))[0] == 200
        assert s.session.end is None  # nobody wanted more
        status, answer = await s.chat("hi", "fine", "more")
        assert (status, answer["error"]["code"], s.session.end) == (403, "turn_limit", "turn_limit")
        [trajectory] = s.policy.trajectories(1.0, end=s.session.end)
        assert (len(trajectory.turns), trajectory.end) == (1, "turn_limit")


async def test_token_limit_ends_the_session():
    async with served(most_tokens=3) as s:
        assert (await s.chat("hi"))[0] == 200  # "fine" and its end: five
        status, answer = await s.chat("hi", "fine", "more")
        assert (status, answer["error"]["code"], s.session.end) == (403, "token_limit", "length")


async def test_sampling_is_pinned_and_only_fewer_tokens_can_be_asked_for():
    """qwen-coder asks for 64,000 tokens, others for a temperature of 0."""
    async with served(lambda _: "abcdefgh") as s:
        await s.chat("hi", temperature=0.0, top_p=0.5, max_tokens=64_000)
        await s.chat("hi", max_completion_tokens=3)
        first, second = (request.sampling for request in s.engine.requests)
        assert (first.temperature, first.top_p, first.max_new_tokens) == (1.0, 1.0, 128)
        assert second.max_new_tokens == 3
        assert s.session.counts["requests_with_differences"] == 1


async def test_temperature_is_the_agents_where_it_is_not_pinned():
    async with served(pinned=()) as s:
        await s.chat("hi", temperature=0.5)
        assert s.policy.trajectories(0.0)[0].turns[0].temperature == 0.5


async def test_retry_gets_the_answer_of_the_first_attempt_and_records_one_turn():
    async with served() as s:
        body = chat_body("hi")
        _, first = await s.post(CHAT, body, x_stainless_retry_count="0")
        _, again = await s.post(CHAT, body, x_stainless_retry_count="1")
        assert (again["id"], len(s.engine.requests)) == (first["id"], 1)
        _, other = await s.post(CHAT, body, x_stainless_retry_count="0")  # the same question, asked anew
        assert (other["id"] != first["id"], len(s.engine.requests)) == (True, 2)


async def test_idempotency_key_names_one_request():
    async with served() as s:
        _, first = await s.post(CHAT, chat_body("hi"), Idempotency_Key="a")
        _, again = await s.post(CHAT, chat_body("hi"), Idempotency_Key="a")
        status, other = await s.post(CHAT, chat_body("ho"), Idempotency_Key="a")
        assert (first["id"], len(s.engine.requests)) == (again["id"], 1)
        assert (status, other["error"]["code"]) == (409, "idempotency_key_in_use")


async def test_retry_of_a_request_under_way_joins_it():
    async with served() as s:
        s.engine.hold()
        first = asyncio.create_task(s.post(CHAT, chat_body("hi"), x_stainless_retry_count="0"))
        await until(lambda: s.engine.running == 1, "the first attempt")
        second = asyncio.create_task(s.post(CHAT, chat_body("hi"), x_stainless_retry_count="1"))
        await until(lambda: s.session.counts["retries"] == 1, "the second attempt")
        s.engine.release()
        (_, one), (_, two) = await first, await second
        assert (one["id"], len(s.engine.requests)) == (two["id"], 1)


async def test_first_turn_whose_client_gave_up_is_answered_to_its_retry():
    async with served() as s:
        s.engine.hold()
        first = asyncio.create_task(s.post(CHAT, chat_body("hi"), x_stainless_retry_count="0"))
        await until(lambda: s.engine.running == 1, "the first attempt")
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(s.post(CHAT, chat_body("hi"), x_stainless_retry_count="1"))
        await until(lambda: s.session.counts["retries"] == 1, "the second attempt")
        s.engine.release()
        assert (await second)[0] == 200
        assert (len(s.engine.requests), len(s.policy.trajectories(0.0))) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("counted", [None, "0"])
async def test_client_that_leaves_ends_its_generation_and_poisons_nothing(stream, counted):
    async with served(retry_grace_s=0.02) as s:
        s.engine.hold()
        headers = {} if counted is None else {"x_stainless_retry_count": counted}
        asking = asyncio.create_task(s.post(CHAT, chat_body("hi", stream=stream), **headers))
        await until(lambda: s.engine.running == 1, "the request")
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: s.engine.running == 0, "the engine to be told")
        s.engine.release()
        assert (await s.chat("hi"))[0] == 200
        assert len(s.policy.trajectories(0.0)) == 1


async def test_answer_that_reached_nobody_is_not_trained():
    async with served() as s:
        await s.chat("hi")
        s.engine.hold()
        asking = asyncio.create_task(s.post(CHAT, chat_body("left"), x_stainless_retry_count="0"))
        await until(lambda: s.engine.running == 1, "the request")
        asking.cancel()
        await asyncio.wait([asking])
        s.engine.release()
        await until(lambda: s.session.counts["turns"] == 2, "an answer within the time for a retry")
        seen = s.session.last
        await s.session.close()
        assert seen is not None
        assert seen.number == 0
        assert [trajectory.is_trained for trajectory in s.policy.trajectories(0.0)] == [True, False]


async def test_closing_a_session_ends_what_is_under_way():
    async with served() as s:
        s.engine.hold()
        asking = asyncio.create_task(s.chat("hi"))
        await until(lambda: s.engine.running == 1, "the request")
        assert min(s.session.longest_wait_s, s.session.unanswered_s) > 0, "it counts as soon as it waits"
        await s.gateway._close(s.session)
        status, answer = await asking
        assert (status, answer["error"]["code"], s.engine.running) == (403, "session_closed", 0)


async def test_engine_failure_may_be_tried_again_and_is_remembered_until_it_succeeds():
    async with served() as s:
        s.engine.fail("broken")
        status, answer = await s.chat("hi")
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert isinstance(s.session.failure, EngineError)
        s.engine._failure = None
        assert (await s.chat("ho"))[0] == 200
        assert s.session.failure is not None  # another request says nothing about that one
        assert (await s.chat("hi"))[0] == 200
        assert s.session.failure is None


async def test_count_tokens_makes_no_node():
    async with served() as s:
        status, answer = await s.post(f"{MESSAGES}/count_tokens", {**HELLO, "system": "be brief"})
        assert (status, answer) == (
            200,
            {"input_tokens": 2 * 2 + len("system be briefuser hiassistant ") + 1},
        )
        assert (s.engine.requests, s.policy.trajectories(0.0)) == ([], ())
        await s.post(MESSAGES, {**BODIES[MESSAGES], "system": "be brief"})
        assert s.policy.trajectories(0.0)[0].turns[0].start == answer["input_tokens"]


async def test_models_and_health():
    async with served() as s:
        async with s.http.get(s.url + "/v1/models") as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["policy"]
        async with s.http.get(s.url + "/v1/models/gpt-5") as answer:
            assert (await answer.json())["id"] == "gpt-5"
        async with s.http.get(s.gateway.url + "/health") as answer:
            assert await answer.json() == {"status": "ok", "sessions": 1}
        async with s.http.get(s.gateway.url + "/v1/models") as answer:
            assert answer.status == 401


async def test_google_counts_tokens_without_a_node():
    async with served() as s:
        count = GENERATE.replace("generateContent", "countTokens")
        status, answer = await s.post(count, {"generateContentRequest": BODIES[GENERATE]})
        assert (status, s.engine.requests) == (200, [])
        assert (await s.post(count, BODIES[GENERATE]))[1] == answer
        _, whole = await s.post(GENERATE, BODIES[GENERATE])
        assert whole["usageMetadata"]["promptTokenCount"] == answer["totalTokens"]
        assert (await s.post(GENERATE.replace("generateContent", "embedContent"), {}))[0] == 404


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, STREAM])
async def test_who_asks_for_a_stream_gets_one_that_is_kept_alive(path):
    """Clients that asked for events and get JSON fail silently."""
    async with served(keep_alive_s=0.01) as s:
        s.engine.hold()
        async with s.http.post(s.url + path, json={**BODIES[path], "stream": True}) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            alive = await answer.content.readline()
            assert alive in (b": keep-alive\n", b"event: ping\n", b"\n")
            s.engine.release()
            assert b"fine" in await answer.content.read()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, STREAM])
async def test_stream_that_has_begun_ends_with_the_apis_error(path):
    async with served(keep_alive_s=0.01) as s:
        s.engine.hold()
        async with s.http.post(s.url + path, json={**BODIES[path], "stream": True}) as answer:
            await answer.content.readline()
            s.engine.fail("broken")
            events = (await answer.content.read()).decode()
        lines = [line.removeprefix("data: ") for line in events.splitlines()]
        data = [json.loads(line) for line in lines if line.startswith("{")]
        assert "broken" in json.dumps(data[-1])


async def test_stream_that_is_refused_at_once_has_the_refusals_status():
    async with served(most_turns=1) as s:
        await s.chat("hi")
        assert (await s.chat("ho", stream=True))[0] == 403


async def test_agents_of_one_session_are_recorded_apart():
    async with served() as s:
        await s.post(CHAT, chat_body("hi"), X_Sluice_Agent="critic")
        await s.chat("hi")
        assert [t.agent for t in s.policy.trajectories(0.0)] == ["critic", "solver"]
        status, _ = await s.post(CHAT, chat_body("hi"), X_Sluice_Agent="a b")
        assert status == 400


@pytest.mark.parametrize(
    ("raw", "value", "components"),
    [
        (b"0.5", 0.5, {}),
        (b'{"reward": -1, "components": {"style": 0.25}}', -1.0, {"style": 0.25}),
        (b'{"components": {"style": 0.25, "right": 1}}', 1.25, {"style": 0.25, "right": 1.0}),
        (b'{"reward": {"solver": 1, "critic": 0}}', {"solver": 1.0, "critic": 0.0}, {}),
    ],
)
async def test_reward_is_taken_with_its_parts_and_its_owner_may_change_it(raw, value, components):
    async with served() as s:
        assert await s.pay(b"7") == (200, {"accepted": True})
        assert (await s.pay(raw))[0] == 200
        assert (s.session.reward.value, dict(s.session.reward.components)) == (value, components)
        assert s.session.reward_source == "client 127.0.0.1"


async def test_key_of_the_session_pays_nothing_before_and_after_the_owner_of_the_reward_key_did():
    async with served() as s:
        everywhere = {"X_Session_ID": s.session.key, "x_api_key": s.session.key}
        for posts in range(2):
            for headers in ({}, everywhere, {"Authorization": f"Bearer {s.session.key}"}):
                status, said = await s.post("/reward", b"1", **headers)
                assert (status, said["error"]["code"]) == (403, "reward_key_needed")
            assert s.session.reward == (PostedReward(reward=0.25) if posts else None)
            assert (await s.post("/reward", b"0.25", Authorization=f"Bearer {s.session.reward_key}"))[
                0
            ] == 200
        assert s.session.counts["refused_rewards"] == 6
        [trajectory] = posted_episode((await s.talked()).policy, s.session, s.session.reward).trajectories
        assert trajectory.metadata["refused_rewards"] == 6


async def test_key_of_a_reward_asks_the_policy_nothing_and_pays_no_other_session_or_later():
    async with served() as s:
        async with s.gateway.session(s.policy.fresh("t.1"), "t.1") as other:
            url = s.gateway.reward_url_of(other)
            refused = await s.post("/v1/chat/completions", chat_body("hi"), Authorization="Bearer x")
            assert refused[0] == 200  # the path names the session
            async with s.http.post(f"{s.gateway.url}/s/{other.reward_key}/v1/models") as answer:
                assert answer.status in (404, 405)
            async with s.http.post(url, data=b"1") as answer:
                assert answer.status == 200
        assert s.session.reward is None
        async with s.http.post(url, data=b"1") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "session_closed")


@pytest.mark.parametrize(
    "raw", [b"NaN", b'"1"', b"", b"{}", b"true", b"1e39", b'{"reward": Infinity}', b"[1]"]
)
async def test_reward_that_is_none_is_refused(raw):
    async with served() as s:
        assert (await s.pay(raw))[0] == 400
        assert s.session.reward is None


async def test_reward_is_refused_where_the_run_computes_it():
    async with served() as s:
        s.session.reward_owner = None
        assert (await s.pay(b"1"))[0] == 403
        assert s.session.reward is None


async def test_address_in_use_is_a_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"gateway.port={port}: cannot listen"):
            await Gateway(GatewayConfig(port=port)).start()


async def test_many_sessions_at_once_lose_nothing():
    async with served() as s, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def episode(number: int) -> int:
            policy = s.policy.fresh(f"e.{number}")
            async with s.gateway.session(policy, f"e.{number}") as session:
                for turn in range(3):
                    texts = ["hi", *["fine", "more"] * turn]
                    async with http.post(
                        f"{s.gateway.url_of(session)}{CHAT}", json=chat_body(*texts)
                    ) as answer:
                        assert answer.status == 200
                [trajectory] = policy.trajectories(0.0)
                return len(trajectory.turns)

        assert await asyncio.gather(*map(episode, range(50))) == [3] * 50


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"host": "0.0.0.0"}, "http://127.0.0.1:{port}"),
        ({"host": "::"}, "http://[::1]:{port}"),
        ({"advertise": "https://actors.example:{port}/"}, "https://actors.example:{port}"),
        ({"advertise": "https://proxy.example/a"}, "https://proxy.example/a"),
    ],
)
async def test_the_url_that_is_told_is_one_by_which_the_gateway_is_reached(settings, url):
    gateway = Gateway(GatewayConfig(**settings))
    try:
        await gateway.start()
        assert gateway.url == url.format(port=gateway.port)
        if "host" in settings:
            async with aiohttp.ClientSession() as http, http.get(f"{gateway.url}/health") as answer:
                assert answer.status == 200
    finally:
        await gateway.close()
