"""What a policy records is what the engine returned, token by token."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Sampling
from actors.episodes.episode import Fork
from actors.episodes.errors import EpisodeError
from actors.policy.other_engines import ALONE, OtherEngines
from actors.policy.policy import Policy
from actors.settings.actors import SamplingConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.trajectory import Turn

END = 1


@pytest.fixture
def scripted(tokenizer):
    """Build a policy whose engine answers with the given texts in turn."""

    def build(*answers, max_new_tokens=64, others=ALONE):
        replies = iter(answers)
        engine = ScriptedEngine(lambda _: tokenizer.encode(next(replies)), policy_version=2)
        return Policy(engine, tokenizer, Sampling(max_new_tokens=max_new_tokens), others=others), engine

    return build


async def test_a_chat_is_recorded_as_rendered_and_sampled(scripted, tokenizer):
    policy, engine = scripted("42<|end|>")
    completion = await policy.chat([{"role": "user", "content": "40+2="}])
    assert (completion.text, completion.finish_reason) == ("42", "stop")
    [trajectory] = policy.trajectories(1.0)
    assert tokenizer.decode(trajectory.token_ids) == "<|user|>40+2=<|assistant|>42<|end|>"
    assert trajectory.loss_mask.tolist() == [False] * 7 + [True] * 3
    assert trajectory.behaviour_logprobs[:7].tolist() == [0] * 7
    np.testing.assert_allclose(trajectory.behaviour_logprobs[7:], [-0.1, -0.11, -0.12], rtol=1e-5)
    assert trajectory.policy_versions.tolist() == [-1] * 7 + [2] * 3
    assert (trajectory.agent, trajectory.reward, trajectory.end) == ("solver", 1.0, "completed")
    assert trajectory.turns == (Turn(7, 10, "stop"),)
    assert list(engine.requests[0].token_ids) == trajectory.token_ids[:7].tolist()
    types = (
        trajectory.token_ids.dtype,
        trajectory.behaviour_logprobs.dtype,
        trajectory.policy_versions.dtype,
    )
    assert types == (np.int32, np.float32, np.int32)


async def test_a_string_is_one_user_message(scripted):
    policy, engine = scripted("a<|end|>", "a<|end|>")
    await policy.chat("40+2=")
    await policy.fresh("other").chat([{"role": "user", "content": "40+2="}])
    assert list(engine.requests[0].token_ids) == list(engine.requests[1].token_ids)


async def test_siblings_tokenise_their_prompt_once(scripted, tokenizer, monkeypatch):
    policy, engine = scripted(*["a<|end|>"] * 4)
    rendered = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer,
        "apply_chat_template",
        lambda *args, **kwargs: (text := render(*args, **kwargs), rendered.append(text))[0],
    )
    siblings = [policy.fresh(f"g.{n}") for n in range(4)]
    for sibling in siblings:
        await sibling.chat("sort 312")
    assert sum("312" in text for text in rendered) == 1
    assert [len(sibling.trajectories(0.0)) for sibling in siblings] == [1, 1, 1, 1]
    assert len({request.request_id for request in engine.requests}) == 4
    assert policy.trajectories(0.0) == ()


async def test_turns_of_a_chat_grow_one_trajectory_without_retokenising(scripted, tokenizer):
    sampled = [tokenizer.convert_tokens_to_ids("ab"), *tokenizer.encode("c<|end|>")]
    assert tokenizer.encode("abc<|end|>") != sampled
    policy, engine = scripted("xyz<|end|>")
    answer = engine._script
    engine._script = lambda prompt: answer(prompt) if sampled[0] in prompt else sampled
    messages = [{"role": "user", "content": "one"}]
    reply = await policy.chat(messages)
    messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "two"}]
    await policy.chat(messages)
    [trajectory] = policy.trajectories(0.5)
    expected = "<|user|>one<|assistant|>abc<|end|><|user|>two<|assistant|>xyz<|end|>"
    assert tokenizer.decode(trajectory.token_ids) == expected
    assert trajectory.token_ids[5:8].tolist() == sampled
    assert [(turn.start, turn.stop) for turn in trajectory.turns] == [(5, 8), (13, 17)]
    assert np.flatnonzero(trajectory.loss_mask).tolist() == [5, 6, 7, 13, 14, 15, 16]


async def test_an_answer_goes_on_after_text_that_is_not_trained(scripted, tokenizer):
    policy, _ = scripted("x=", "3<|end|>", "y<|end|>")
    begun = await policy.chat("one", agent="a", sampling=replace(policy.sampling, max_new_tokens=2))
    rest = await policy.go_on(begun, " 1+2=")
    [trajectory] = policy.trajectories(1.0)
    assert tokenizer.decode(trajectory.token_ids) == "<|user|>one<|assistant|>x= 1+2=3<|end|>"
    assert tokenizer.decode(trajectory.token_ids[trajectory.loss_mask]) == "x=3<|end|>"
    assert (rest.text, trajectory.agent, len(trajectory.turns)) == ("3", "a", 2)
    with pytest.raises(EpisodeError, match="completion 0 is the last one of no trajectory"):
        await policy.go_on(begun, " 1+2=")


async def test_a_reply_that_was_cut_gets_its_end_token_as_context(scripted, tokenizer):
    policy, _ = scripted("abcdef", "x<|end|>", max_new_tokens=3)
    messages = [{"role": "user", "content": "one"}]
    reply = await policy.chat(messages)
    assert (reply.text, reply.finish_reason) == ("abc", "length")
    await policy.chat(
        [*messages, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "two"}]
    )
    [trajectory] = policy.trajectories(0.0)
    sampled = tokenizer.decode(trajectory.token_ids[trajectory.loss_mask])
    assert sampled == "abcx<|end|>"
    assert (trajectory.token_ids == END).sum() == 2


async def test_a_rewritten_history_starts_a_new_trajectory(scripted):
    policy, _ = scripted("abc<|end|>", "xyz<|end|>")
    await policy.chat("one")
    await policy.chat([{"role": "user", "content": "in short"}])
    assert [t.fork for t in policy.trajectories(0.0)] == [None, None]


async def test_agents_have_trajectories_and_rewards_of_their_own(scripted):
    policy, _ = scripted("abc<|end|>", "xyz<|end|>")
    await policy.chat("one", agent="solver")
    await policy.chat("one", agent="critic")
    solver, critic = policy.trajectories({"solver": 1.0, "critic": 0.25})
    assert (solver.agent, solver.reward) == ("solver", 1.0)
    assert (critic.agent, critic.reward) == ("critic", 0.25)


async def test_a_context_that_departs_from_an_earlier_one_is_forked_from_it(scripted):
    policy, _ = scripted("abc<|end|>", "xyz<|end|>", "x<|end|>", "y<|end|>", "z<|end|>")
    one = {"role": "user", "content": "one"}
    await policy.chat([one])
    await policy.chat([one])  # the same prompt again
    answered = [one, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "two"}]
    await policy.chat(answered)
    await policy.chat([*answered[:2], {"role": "user", "content": "other"}])  # back to after the first answer
    await policy.chat([one], agent="critic")
    first, again, back, critic = policy.trajectories(0.0)
    assert [first.fork, again.fork, back.fork, critic.fork] == [None, Fork(0, 5), Fork(0, 10), None]
    assert first.token_ids[:10].tolist() == back.token_ids[:10].tolist()
    assert first.token_ids[10] != back.token_ids[10]


async def test_each_turn_is_recorded_with_the_sampling_that_it_was_asked_for(scripted):
    policy, engine = scripted("ab<|end|>", "cdefg", "hi<|end|>", max_new_tokens=4)
    first = await policy.generate([10])
    context = [10, *first.token_ids.tolist()]
    warm = replace(policy.sampling, temperature=0.5, top_p=0.9, top_k=7)
    second = await policy.generate(context, sampling=warm)
    await policy.generate([*context, *second.token_ids.tolist(), 11])
    policy.reward_turn(second, -0.25)
    [trajectory] = policy.trajectories(1.0, end="turn_limit", reward_components={"format": 0.5})
    assert trajectory.turns == (
        Turn(1, 4, "stop"),
        Turn(4, 8, "length", temperature=0.5, top_p=0.9, top_k=7, reward=-0.25),
        Turn(9, 12, "stop"),
    )
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.5, 1.0]
    assert (trajectory.end, trajectory.reward_components) == ("turn_limit", {"format": 0.5})


@pytest.mark.parametrize("temperature", [0.0, 0.009])
async def test_greedy_turns_and_frozen_agents_are_recorded_but_not_trained(scripted, temperature):
    policy, _ = scripted("ab<|end|>", "cd<|end|>", "ef<|end|>")
    first = await policy.generate([10])
    greedy = replace(policy.sampling, temperature=temperature)
    await policy.generate([10, *first.token_ids.tolist()], sampling=greedy)
    await policy.generate([20], agent="judge", trainable=False)
    solver, judge = policy.trajectories(1.0)
    assert solver.loss_mask.tolist() == [False, True, True, True, False, False, False]
    assert solver.policy_versions.tolist() == [-1, 2, 2, 2, 2, 2, 2]
    assert (solver.behaviour_logprobs[1:] < 0).all()
    assert [turn.temperature for turn in solver.turns] == [1.0, temperature]
    assert (solver.trainable, judge.trainable) == (True, False)
    assert not judge.loss_mask.any()
    assert judge.policy_versions.tolist() == [-1, 2, 2, 2]


async def test_no_turn_is_trained_whose_log_probs_would_be_of_another_temperature(scripted):
    policy, _ = scripted(*["a<|end|>"] * 3, others=OtherEngines(unscaled={"default"}))
    warm = replace(policy.sampling, temperature=0.5)
    with pytest.raises(EpisodeError, match=r"temperature 0\.5, .*policy 'default' tell log-probs at"):
        await policy.chat("x", sampling=warm)
    await policy.chat("x", sampling=warm, trainable=False)
    await policy.chat("x", sampling=replace(policy.sampling, temperature=0.0))
    await policy.chat("x")
    assert [any(one.loss_mask) for one in policy.trajectories(1.0)] == [False, False, True]


async def test_a_completion_that_is_cancelled_before_it_was_read_is_not_trained(scripted, monkeypatch):
    policy, _ = scripted("42<|end|>")
    is_read = asyncio.Event()

    async def hang(*_, **__):
        is_read.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(policy._format, "read", hang)
    asking = asyncio.create_task(policy.chat("40+2="))
    await is_read.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert [trajectory.is_trained for trajectory in policy.trajectories(1.0)] == [False]


async def test_the_last_turn_says_how_a_trajectory_ended(scripted):
    policy, _ = scripted("abcdef", "ab<|end|>", max_new_tokens=3)
    await policy.generate([10])
    await policy.generate([20])
    assert [trajectory.end for trajectory in policy.trajectories(0.0)] == ["length", "completed"]


async def test_tokens_can_be_continued_as_they_are(scripted, tokenizer):
    policy, _ = scripted("ab", "cd")
    first = await policy.generate([10, 11])
    await policy.generate([10, 11, *first.token_ids.tolist(), 12])
    [trajectory] = policy.trajectories(0.0)
    assert trajectory.token_ids.tolist() == [10, 11, *tokenizer.encode("ab"), 12, *tokenizer.encode("cd")]
    assert trajectory.loss_mask.tolist() == [False, False, True, True, False, True, True]


def test_sampling_comes_from_the_config():
    config = SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9)
    assert Sampling.from_config(config, [1, 2]) == Sampling(0.7, 0.9, 5, 9, (1, 2))
    cut = SamplingConfig(min_p=0.1, keep_masks=True)
    assert Sampling.from_config(cut, []) == Sampling(min_p=0.1, keep_masks=True)


async def test_each_completion_has_a_seed_of_its_own_that_is_always_the_same(tokenizer):
    async def seeds(rollout_id):
        engine = ScriptedEngine(lambda _: tokenizer.encode("4<|end|>"))
        policy = Policy(engine, tokenizer, Sampling()).fresh(rollout_id)
        await policy.chat("1")
        await policy.chat("2")
        return [request.sampling.seed for request in engine.requests]

    one, again, sibling = await seeds("g.0"), await seeds("g.0"), await seeds("g.1")
    assert one == again
    assert len({*one, *sibling}) == 4
    assert all(0 <= seed < 1 << 63 for seed in one)


async def test_tools_are_rendered_by_the_template(scripted, tokenizer, monkeypatch):
    policy, engine = scripted("a<|end|>", "b<|end|>")
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    await policy.chat("1+1=", tools=[tool])
    await policy.fresh("other").chat("1+1=", tools=[])
    prompts = [tokenizer.decode(request.token_ids) for request in engine.requests]
    assert prompts == ["add<|user|>1+1=<|assistant|>", "<|user|>1+1=<|assistant|>"]


async def test_an_agent_may_belong_to_a_policy_of_another_name(scripted):
    policy, _ = scripted("abc<|end|>", "xyz<|end|>", "a<|end|>")
    await policy.chat("one", agent="critic", policy="critics")
    first = await policy.chat("one")
    await policy.generate([*policy.trajectories(0.0)[1].token_ids, 11], policy="others")
    critic, solver, other = policy.trajectories(0.0)
    assert (critic.policy, solver.policy, other.policy) == ("critics", "default", "others")
    assert (first.content, first.tool_calls, other.fork) == ("xyz", (), None)
