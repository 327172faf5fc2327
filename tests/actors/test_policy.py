"""What a policy records is what the engine returned, token by token."""

import numpy as np
import pytest

from actors.config import SamplingConfig
from actors.engines.base import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.policy.policy import Policy

END = 1


@pytest.fixture
def scripted(tokenizer):
    """Build a policy whose engine answers with the given texts in turn."""

    def build(*answers, max_new_tokens=64):
        replies = iter(answers)
        engine = ScriptedEngine(lambda _: tokenizer.encode(next(replies)), policy_version=2)
        return Policy(engine, tokenizer, Sampling(max_new_tokens=max_new_tokens)), engine

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
    assert (trajectory.agent, trajectory.reward, trajectory.finish_reason) == ("solver", 1.0, "stop")
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
        lambda *args, **kwargs: (rendered.append(1), render(*args, **kwargs))[1],
    )
    siblings = [policy.fresh(f"g.{n}") for n in range(4)]
    for sibling in siblings:
        await sibling.chat("sort 312")
    assert len(rendered) == 1
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
    assert len(policy.trajectories(0.0)) == 2


async def test_agents_have_trajectories_and_rewards_of_their_own(scripted):
    policy, _ = scripted("abc<|end|>", "xyz<|end|>")
    await policy.chat("one", agent="solver")
    await policy.chat("one", agent="critic")
    solver, critic = policy.trajectories({"solver": 1.0, "critic": 0.25})
    assert (solver.agent, solver.reward) == ("solver", 1.0)
    assert (critic.agent, critic.reward) == ("critic", 0.25)


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
