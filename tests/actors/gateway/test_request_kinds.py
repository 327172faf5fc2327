"""Which requests are untrained, of a sub-agent or of another policy, and the rewards of single turns."""

import pytest

from actors.environments.session_episode import posted_episode
from actors.gateway.posted_reward import PostedReward
from actors.policy.other_engines import OtherEngines
from actors.settings.agents import AgentConfig
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.gateway.request_bodies import BODIES, CHAT, GENERATE, MESSAGES, RESPONSES
from tests.actors.gateway.served import chat_body, script, served

TITLE = {"messages": [{"role": "system", "content": "You write a\ntitle."}, *BODIES[CHAT]["messages"]]}
UNTRAINED = (
    ({"model": "*haiku*"}, {**BODIES[CHAT], "model": "claude-haiku-9"}, {}),
    ({"model": "*[1m]"}, {**BODIES[CHAT], "model": "claude-9[1m]"}, {}),
    ({"system": "You write*title*"}, TITLE, {}),
    ({"agent": "critic"}, BODIES[CHAT], {"X_Sluice_Agent": "critic"}),
    (None, BODIES[CHAT], {"X_Sluice_Trained": "false"}),
    ({"model": "any", "as_agent": "aide"}, BODIES[CHAT], {"X_Sluice_Trained": "true"}),
)


@pytest.mark.parametrize(("rule", "body", "headers"), UNTRAINED)
async def test_requests_that_a_rule_or_a_header_names_are_untrained_and_not_the_last_word(
    rule, body, headers
):
    rules = () if rule is None else ({"model": "*opus*"}, {**rule, "trained": False})
    async with served(rules=rules) as s:
        await s.chat("hello", model="other")
        last = s.session.last
        assert (await s.post(CHAT, body, **headers))[0] == 200
        trained = [(part.is_trained, part.agent) for part in s.policy.trajectories(1.0)]
    assert [is_trained for is_trained, _ in trained] == [True, False]
    assert s.session.last is last
    assert trained[1][1] == (rule or {}).get("as_agent", headers.get("X_Sluice_Agent", "solver"))


@pytest.mark.parametrize("headers", [{"X_Sluice_Policy": "judge"}, {"X_Sluice_Agent": "user"}])
async def test_requests_are_routed_to_a_frozen_policy_by_header_or_rule(headers):
    judge = ScriptedEngine(script(lambda _: "good"))
    async with served(rules=({"agent": "user", "policy": "judge"},), policies=("judge",)) as s:
        s.policy._others = OtherEngines(opponents={"judge": judge})
        _, answer = await s.post(CHAT, chat_body("hi"), **headers)
        assert answer["choices"][0]["message"]["content"] == "good"
        [routed] = s.policy.trajectories(1.0)
        assert (routed.policy, routed.is_trained, s.session.last) == ("judge", False, None)
        status, refused = await s.post(CHAT, chat_body("hi"), X_Sluice_Policy="jury")
    assert (status, refused["error"]["message"]) == (400, "there is no policy 'jury' to answer, but judge")


def test_policies_of_rules_are_known_to_the_settings():
    gateway = {"rules": [{"policy": "judge"}, {"trained": False}], "policies": ["user"]}
    assert AgentConfig(command="true", gateway=gateway).opponents_named == ("user", "judge")


async def test_an_opponent_that_the_settings_do_not_name_answers_nobody_here():
    """A policy with a shell would have a better one answer for it."""
    engine = ScriptedEngine(script(lambda _: "the answer"))
    async with served() as s:
        s.policy._others = OtherEngines(opponents={"teacher": engine})
        status, _ = await s.post(CHAT, chat_body("hi"), X_Sluice_Policy="teacher")
        assert (status, engine.requests) == (400, [])


@pytest.mark.parametrize("value", ["maybe", ""])
async def test_a_header_that_cannot_be_heeded_is_refused(value):
    async with served() as s:
        status, answer = await s.post(CHAT, chat_body("hi"), X_Sluice_Trained=value)
        assert (status, "X-Sluice-Trained" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "own", "first", "second"),
    [
        (MESSAGES, {}, {"x_claude_code_agent_id": "a1"}, {"x_claude_code_agent_id": "b2"}),
        (
            RESPONSES,
            {"thread_id": "t0"},
            {"thread_id": "t1", "x_openai_subagent": "collab_spawn"},
            {"thread_id": "t2", "x_openai_subagent": "review"},
        ),
    ],
)
async def test_sub_agents_are_told_apart_by_the_ids_that_coding_agents_send(path, own, first, second):
    async with served() as s:
        refused = {"x_claude_code_agent_id": "c3"} if path == MESSAGES else {**first, "thread_id": "t3"}
        assert (await s.post(path, BODIES[path], **refused, X_Sluice_Trained="maybe"))[0] == 400
        for headers in (own, first, second, first):
            assert (await s.post(path, BODIES[path], **headers))[0] == 200
        recorded = [part.agent for part in s.policy.trajectories(1.0)]
        assert recorded == ["solver", "subagent-1", "subagent-2", "subagent-1"]
        assert s.session.last.number == 0


@pytest.mark.parametrize(
    ("path", "id_of"), [(CHAT, "id"), (MESSAGES, "id"), (RESPONSES, "id"), (GENERATE, "responseId")]
)
async def test_a_turn_is_rewarded_by_the_id_of_its_answer(path, id_of):
    async with served() as s:
        _, answer = await s.post(path, BODIES[path])
        turns = f"{s.gateway.reward_url_of(s.session)}/turns"
        async with s.http.post(f"{turns}/{answer[id_of]}", data=b"0.25") as accepted:
            assert accepted.status == 200
        [trajectory] = posted_episode(s.policy, s.session, PostedReward(reward=1)).trajectories
        assert (trajectory.turns[0].reward, trajectory.reward) == (0.25, 1.0)


async def test_a_turn_is_rewarded_by_nobody_else_and_by_a_number_alone():
    async with served() as s:
        _, answer = await s.chat("hi")
        own, turns = f"/turns/{answer['id']}", f"{s.gateway.reward_url_of(s.session)}/turns"
        wrong_key = f"{s.gateway.url}/rewards/{s.session.key}{own}"
        for url, raw, status in (
            (f"{turns}/{answer['id']}", b'"much"', 400),
            (f"{turns}/chatcmpl-{'0' * 24}", b"1", 404),
            (wrong_key, b"1", 404),
        ):
            async with s.http.post(url, data=raw) as refused:
                assert refused.status == status
        s.session.reward_owner = None
        async with s.http.post(f"{turns}/{answer['id']}", data=b"1") as refused:
            assert refused.status == 403
        assert s.policy.trajectories(0.0)[0].turns[0].reward is None
