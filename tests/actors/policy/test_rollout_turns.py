"""Turns that another actor left of a rollout: used once each, and only for the same question."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.base import Generation, Sampling
from actors.policy.policy import Policy
from actors.policy.rollout_turns import RolloutTurns, SampledTurn
from actors.rollouts.interruption import turn_message, turns_by_rollout
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import decode, encode
from bus.kept_sets import KeptSets
from bus.trajectory import KeptTurn
from learner.initial.scratch_model import character_tokenizer
from tests.factories import make_lease

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
DIGITS = TOKENIZER("1234567890", add_special_tokens=False)["input_ids"]
PROMPT = TOKENIZER("=", add_special_tokens=False)["input_ids"]
SAMPLING = Sampling(max_new_tokens=16, stop_token_ids=(END,))


def digits(token_ids) -> list[int]:
    """The digits after the prompt that are not there yet, and the end token."""
    return [*DIGITS[len(token_ids) - len(PROMPT) :], END]


async def interrupted(sampling: Sampling) -> list[SampledTurn]:
    """What a rollout leaves whose only completion is cut short half-way."""
    engine = ScriptedEngine(digits)
    policy = Policy(engine, TOKENIZER, sampling)
    policy.turns.begin("g.0")
    engine.hold()
    asking = asyncio.create_task(policy.fresh("g.0").generate(PROMPT))
    await asyncio.sleep(0)
    turns = policy.turns.of("g.0")
    await turns.interrupt()
    await asyncio.sleep(0)
    assert not asking.done()  # it waits to be cancelled, and asks nothing further
    asking.cancel()
    return turns.unstored(since=0)


async def went_on(left: list[SampledTurn], sampling: Sampling = SAMPLING, prompt=PROMPT):
    """The completion of an actor that was left these turns, and what its engine was asked."""
    engine = ScriptedEngine(digits, policy_version=3)
    policy = Policy(engine, TOKENIZER, sampling)
    policy.turns.begin("g.0", left)
    rollout = policy.fresh("g.0")
    await rollout.generate(prompt)
    [trajectory] = rollout.trajectories(1.0)
    return trajectory, engine.requests, policy.turns


async def test_an_interrupted_completion_is_gone_on_with_from_its_tokens():
    left = await interrupted(SAMPLING)
    assert [turn.generation.token_ids.tolist() for turn in left] == [DIGITS[:5]]
    trajectory, [request], turns = await went_on(left)
    assert (list(request.token_ids), request.sampling.max_new_tokens) == ([*PROMPT, *DIGITS[:5]], 11)
    assert trajectory.token_ids.tolist() == [*PROMPT, *DIGITS, END]
    assert trajectory.policy_versions.tolist() == [-1, *[0] * 5, *[3] * 6]
    assert turns.counts == {"reused_turns": 1, "reused_tokens": 5}
    [whole] = turns.of("g.0").unstored(since=0)
    assert whole.generation.finish_reason == "stop"


async def test_a_stop_string_is_found_across_the_place_where_a_completion_was_cut():
    sampling = replace(SAMPLING, stop=("567",))
    left = await interrupted(sampling)
    trajectory, requests, _ = await went_on(left, sampling)
    assert trajectory.token_ids.tolist() == [*PROMPT, *DIGITS[:7]]
    assert trajectory.turns[0].finish_reason == "stop"
    assert len(requests) == 1


@pytest.mark.parametrize(("tokens", "finish"), [([*DIGITS, END], "stop"), (DIGITS[:4] * 4, "length")])
async def test_a_completion_cut_short_after_its_last_token_is_not_asked_for_again(tokens, finish):
    [turn] = await interrupted(SAMPLING)
    values = np.full(len(tokens), -0.5, np.float32)
    last = Generation(np.array(tokens, np.int32), values, np.zeros(len(tokens), np.int32), "abort")
    trajectory, requests, _ = await went_on([replace(turn, generation=last)])
    assert requests == []
    assert trajectory.turns[0].finish_reason == finish


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"max_new_tokens": 15}, {"stop": ("9",)}]
)
async def test_a_turn_answers_no_question_that_was_asked_otherwise(changes):
    left = await interrupted(SAMPLING)
    trajectory, requests, turns = await went_on(left, replace(SAMPLING, **changes))
    assert list(requests[0].token_ids) == PROMPT
    assert (set(trajectory.policy_versions.tolist()), dict(turns.counts)) == ({-1, 3}, {})


async def test_a_turn_answers_no_other_context():
    left = await interrupted(SAMPLING)
    _, requests, turns = await went_on(left, prompt=[*PROMPT, *PROMPT])
    assert (len(requests), dict(turns.counts)) == (1, {})


async def test_a_turn_is_used_once_so_the_same_question_again_is_sampled():
    engine = ScriptedEngine(digits, policy_version=3)
    policy = Policy(engine, TOKENIZER, SAMPLING)
    policy.turns.begin("g.0")
    await policy.fresh("g.0").generate(PROMPT)
    left = policy.turns.of("g.0").unstored(since=0)
    policy.turns.begin("g.0", left)
    rollout = policy.fresh("g.0")
    await rollout.generate(PROMPT)
    await rollout.generate(PROMPT)
    assert (len(engine.requests), policy.turns.counts["reused_turns"]) == (2, 1)


async def test_a_rollout_that_nobody_records_leaves_no_turns():
    policy = Policy(ScriptedEngine(digits), TOKENIZER, SAMPLING)
    await policy.fresh("heldout").generate(PROMPT)
    assert policy.turns.of("heldout") is None


def sampled(versions: list[int], *, trained: bool = True, experts=np.uint8) -> SampledTurn:
    count = len(versions)
    generation = Generation(
        np.arange(count, dtype=np.int32),
        np.full(count, -0.25, np.float32),
        np.array(versions, np.int32),
        "stop",
        np.arange(count * 6, dtype=experts).reshape(count, 3, 2),
        KeptSets.of([np.array([n, 90], np.int32) for n in range(count)]),
    )
    return SampledTurn(2, b"0123456789abcdef", generation, trained)


def test_only_turns_that_may_enter_the_loss_are_bound_to_a_version():
    turns = RolloutTurns([], Counter())
    for number, turn in enumerate(
        [sampled([3, 4]), sampled([2, 4]), sampled([2], trained=False), sampled([])]
    ):
        turns.note(replace(turn, number=number))
    assert [turn.number for turn in turns.unstored(since=3)] == [0, 2]
    turns.stored(turns.unstored(since=3))
    assert turns.unstored(since=3) == []


@pytest.mark.parametrize("experts", [np.uint8, np.uint16])
def test_a_turn_travels_bit_for_bit_with_its_experts_and_kept_sets(experts):
    turn = sampled([3, 3, 4], experts=experts)
    message = decode(encode(turn_message(turn, make_lease(7), 1, "actor-7")), KeptTurn)
    assert (message.lease_id, message.rollout, message.number, message.actor) == (7, 1, 2, "actor-7")
    [(rollout, [back])] = turns_by_rollout([message]).items()
    assert (rollout, back.key, back.trained) == (1, turn.key, True)
    for name in ("token_ids", "logprobs", "policy_versions", "routed_experts"):
        assert np.array_equal(getattr(back.generation, name), getattr(turn.generation, name))
    assert back.generation.kept.token_ids.tolist() == [0, 90, 1, 90, 2, 90]
