"""Whatever an environment, an engine and a learner do, what was recorded replays under the model itself."""

import asyncio
from collections import Counter
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from actors.engines.base import Generation, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.episodes.episode import Episode
from actors.policy.policy import Policy
from actors.rollouts.group import Group
from actors.settings.engines import EmbeddedEngineConfig
from benchmarks.scripted_engine import ScriptedEngine
from tests.actors.policy.families import FAMILIES, Family
from tests.actors.policy.retold_chats import UNSHRUNK, answers, retold, sampled
from tests.factories import make_lease

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": NUMBERS}}
VOCAB = 288
MOST_NATS = 1e-4


@lru_cache
def model_of(version: int) -> PreTrainedModel:
    """The policy of a version: tiny, and unlike that of any other version."""
    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=8192, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(config).eval()


@torch.inference_mode()
def replayed(tokens, positions, version: int, temperature: float) -> np.ndarray:
    """Log-probs of the tokens at `positions`, by one forward pass over all."""
    ids = torch.tensor([list(tokens)])
    logits = model_of(version)(input_ids=ids, use_cache=False).logits[0].double() / (temperature or 1.0)
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.as_tensor(positions) - 1, ids[0, positions]].numpy()


class ModelEngine(ScriptedEngine):
    """Scripted tokens, with log-probs of the model of the version that each was drawn under."""

    def __init__(self, script) -> None:
        super().__init__(script)
        self.returned: list[tuple] = []
        self.arrived = asyncio.Semaphore(0)

    async def generate(self, request) -> Generation:
        self.arrived.release()
        found = await super().generate(request)
        self.returned.append(recorded(request.token_ids, found.token_ids, found.policy_versions))
        return found

    def _generation(self, request, version_before, *, aborted) -> Generation:
        found = super()._generation(request, version_before, aborted=aborted)
        tokens, begin = [*request.token_ids, *found.token_ids.tolist()], len(request.token_ids)
        logprobs = np.zeros(len(found.token_ids), np.float32)
        for version in set(found.policy_versions.tolist()):
            drawn = np.flatnonzero(found.policy_versions == version)
            logprobs[drawn] = replayed(tokens, drawn + begin, version, request.sampling.temperature)
        return replace(found, logprobs=logprobs)


def recorded(context, tokens, versions) -> tuple:
    return tuple(map(int, context)), tuple(map(int, tokens)), tuple(map(int, versions))


SCRIPT: ContextVar[list[int]] = ContextVar("script")
"""What the engine is to answer in this task."""


class Turn(NamedTuple):
    """One call of the policy, drawn before it begins: the order of events must not change what is drawn."""

    agent: str
    history: list
    way: str
    temperature: float
    tokens: list[int]


class Episodes:
    """Branches of conversations of several agents with one policy, and what may happen to them."""

    def __init__(self, family: Family, data) -> None:
        self.family, self.data = family, data
        self.engine = ModelEngine(lambda _: SCRIPT.get())
        end = family.tokenizer.convert_tokens_to_ids(family.end)
        sampling = Sampling(stop_token_ids=(end,), max_new_tokens=data.draw(st.sampled_from((8, 200))))
        self.policy = Policy(self.engine, family.tokenizer, sampling).fresh("r")
        self.branches: list[tuple[str, list[tuple[dict, str | None]]]] = []

    def tokens(self) -> list[int]:
        if self.data.draw(st.booleans(), label="noise"):
            return self.data.draw(st.lists(st.integers(0, VOCAB - 3), min_size=1, max_size=9))
        return sampled(self.data.draw(answers(self.family)), self.family, self.family.end)

    def question(self, answer: dict | None) -> list[tuple[dict, None]]:
        text = self.data.draw(st.sampled_from(("abc", "ér\n", " x", "0")))
        calls = (answer or {}).get("tool_calls", ())
        told = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        return [(message, None) for message in told or [{"role": "user", "content": text}]]

    def plan(self) -> Turn:
        """Draw a turn: a branch goes on, as it is, told otherwise, rewritten, or from further back."""
        draw = self.data.draw
        if not self.branches or draw(st.integers(0, 4)) == 0:
            agent, history = draw(st.sampled_from(("one", "two"))), []
        else:
            agent, history = draw(st.sampled_from(self.branches))
            history = list(history)
        what = draw(st.sampled_from(("on", "on", "on", "back", "rewrite")))
        ends = [n for n, (_, text) in enumerate(history) if text is not None]
        if what == "back" and ends:
            history = history[: draw(st.sampled_from(ends)) + draw(st.integers(0, 1))]
        if what == "rewrite" and history:
            number = draw(st.integers(0, len(history) - 1))
            message, _ = history[number]
            history[number] = ({**message, "content": message["content"] + "!"}, None)
        if not history or history[-1][1] is not None:
            history += self.question(history[-1][0] if history else None)
        way = draw(st.sampled_from(("same", "otherwise", "text", "without reasoning")))
        temperature = draw(st.sampled_from((1.0, 1.0, 0.7, 0.0)))
        return Turn(agent, history, way, temperature, self.tokens())

    async def turn(self, turn: Turn) -> tuple[str, list]:
        """Do what was drawn; return the branch that it made."""
        SCRIPT.set(turn.tokens)
        told = [retold(message, turn.way, text) for message, text in turn.history]
        sampling = replace(self.policy.sampling, temperature=turn.temperature)
        answer = await self.policy.chat(told, turn.agent, tools=[TOOL], sampling=sampling)
        return turn.agent, [*turn.history, (answer.message, answer.text)]

    async def held(self, turns: int, what: str) -> None:
        """Begin turns, and swap the weights, abort or cancel one of them while they are half done."""
        planned = [self.plan() for _ in range(turns)]
        self.engine.hold()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.turn(turn)) for turn in planned]
            for _ in tasks:  # contexts are made in a thread
                await self.engine.arrived.acquire()
            if what == "swap":
                await self.engine.load_weights({}, self.engine.policy_version + 1)
            elif what == "abort":
                await self.engine.abort(self.engine.requests[-1].request_id)
            elif what == "cancel":
                tasks[0].cancel()
            self.engine.release()
        self.branches += [task.result() for task in tasks if not task.cancelled()]

    def check(self) -> None:
        trajectories = self.policy.trajectories(1.0)
        found = Counter(
            recorded(
                t.token_ids[: turn.start],
                t.token_ids[turn.start : turn.stop],
                t.policy_versions[turn.start : turn.stop],
            )
            for t in trajectories
            for turn in t.turns
        )
        assert found == Counter(self.engine.returned)  # nothing is lost, twice or elsewhere
        for t in trajectories:
            sampled_at = np.concatenate([np.arange(turn.start, turn.stop) for turn in t.turns])
            assert np.flatnonzero(t.policy_versions >= 0).tolist() == sampled_at.tolist()
            trained = [np.arange(u.start, u.stop) for u in t.turns if u.temperature > 0]
            assert np.flatnonzero(t.loss_mask).tolist() == np.concatenate([*trained, []]).astype(int).tolist()
            check_replay(t)
            if t.fork is not None:
                parent = trajectories[t.fork.strand].token_ids
                shared = t.fork.token
                assert parent[:shared].tolist() == t.token_ids[:shared].tolist()
        group = Group(make_lease(0, samples=1), None, "actor")
        group.add(0, Episode(trajectories))
        for _, batch, _ in group.unsent():
            for message in batch.trajectories:
                message.check()


def check_replay(trajectory) -> None:
    """Compare each sampled token's log-prob with that of its version's model."""
    for turn in trajectory.turns:
        span = np.arange(turn.start, turn.stop)
        for version in set(trajectory.policy_versions[span].tolist()):
            positions = span[trajectory.policy_versions[span] == version]
            expected = replayed(trajectory.token_ids[: turn.stop], positions, version, turn.temperature)
            np.testing.assert_allclose(
                trajectory.behaviour_logprobs[positions], expected, rtol=0, atol=MOST_NATS
            )


ACTIONS = st.tuples(st.integers(1, 3), st.sampled_from(("nothing", "swap", "swap", "abort", "cancel")))


async def interleaved(name: str, data) -> None:
    """Draw an interleaving, and check what it left."""
    episodes = Episodes(FAMILIES[name], data)
    for turns, what in data.draw(st.lists(ACTIONS, min_size=2, max_size=5)):
        await episodes.held(turns, what)
    episodes.check()


@settings(max_examples=2, phases=UNSHRUNK)
@given(data=st.data())
def test_every_token_replays_to_its_logprob_and_version(data):
    asyncio.run(interleaved("qwen3", data))


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "hermes", "llama3", "no_end"])
@settings(max_examples=8, phases=UNSHRUNK)
@given(data=st.data())
def test_any_interleaving_replays_in_every_family(name, data):
    asyncio.run(interleaved(name, data))


async def test_turns_of_the_embedded_engine_replay_across_weight_swaps():
    qwen = FAMILIES["qwen3"].tokenizer
    stops = tuple(qwen.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"]))
    engine = EmbeddedEngine(model_of_its_own(), EmbeddedEngineConfig(seed=0), policy_version=0)
    await engine.start()
    try:
        policy = Policy(engine, qwen, Sampling(stop_token_ids=stops, max_new_tokens=12))
        messages = [{"role": "user", "content": "one"}]
        for version in range(1, 4):
            answer = await policy.chat(messages, tools=[TOOL])
            messages += [answer.message, {"role": "user", "content": f"and {version}"}]
            await engine.load_weights(model_of(version).state_dict(), version)
        await asyncio.gather(*(policy.chat([*messages, {"role": "user", "content": c}]) for c in "xy"))
        await policy.chat(messages, tools=[TOOL])
    finally:
        await engine.close()
    grown, *others = policy.trajectories(0.0)
    assert sorted(set(grown.policy_versions.tolist())) == [-1, 0, 1, 2, 3]
    assert [len(grown.turns), *(len(other.turns) for other in others)] == [4, 1, 1]
    for trajectory in (grown, *others):
        check_replay(trajectory)


def model_of_its_own() -> PreTrainedModel:
    """A copy of version 0, for an engine that loads other weights into it."""
    model_of.cache_clear()
    model = model_of(0)
    model_of.cache_clear()
    return model
