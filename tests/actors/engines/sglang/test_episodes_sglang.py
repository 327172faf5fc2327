"""Episodes over a real SGLang server: tools, reasoning, several agents, weights that change in the middle.

All that was recorded is what the server returned, and has the log-probs that transformers computes with the
weights of each token's version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from actors.engines.base import Engine, Generation, GenerationRequest, Sampling
from actors.engines.fleet.fleet import Fleet
from actors.engines.sglang.engine import SglangEngine
from actors.environments.build import build_environment
from actors.episodes.episode import AgentTrajectory
from actors.episodes.task import Task
from actors.evaluation.dedicated import beside_rollouts, refuse_unfit_servers
from actors.evaluation.engines import OwnEngine
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.engines import SglangEngineConfig
from actors.settings.fleet import FleetConfig
from actors.settings.panel import DebateConfig
from actors.settings.tool_chat import ToolsConfig
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.server.nats_server import NatsServer
from bus.topology import ensure
from storage.weights.blob_sources import Blobs
from tests.actors.chat_model import END_ID, TOKENIZER, chat_model
from tests.actors.held_out import published
from tests.actors.sglang_served import CONFIG, MOST_NATS, in_flight, noted, requests_at_the_worker, until

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(420)]

TASK = Task(task_id="t", prompt="6*7", label="done")
NEVER = {"thought": 0.0}
"""A model that does not come to an end of its reasoning."""
Models = Mapping[int, PreTrainedModel]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory) -> AsyncIterator[SglangEngine]:
    """One server for all tests of this module; starting one takes half a minute."""
    model = tmp_path_factory.mktemp("model")
    chat_model(0).config.save_pretrained(model)
    engine = SglangEngine(model, SglangEngineConfig(**CONFIG), tmp_path_factory.mktemp("log") / "engine.log")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@dataclass
class Recorder:
    """Passes requests on, and keeps what was returned to each; `between` runs after the first of them, and
    no answer is handed on before it has ended."""

    engine: Engine
    between: Callable[[], AsyncIterator[None]] | None = None
    returned: list[tuple[tuple[int, ...], Generation]] = field(default_factory=list)
    going_on: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.engine.generate(request)
        self.returned.append((tuple(request.token_ids), generation))
        async with self.going_on:
            if (between := self.between) is not None:
                self.between = None
                await between()
        return generation


def policy_on(engine, new: int = 1500) -> Policy:
    return Policy(engine, TOKENIZER, Sampling(max_new_tokens=new, stop_token_ids=(END_ID,)))


@torch.inference_mode()
def replayed(
    models: Models, tokens: Sequence[int], start: int, versions: Sequence[int], *, keeps_cache: bool
) -> np.ndarray:
    """Log-probs of the tokens from `start` on, each under its version.

    With `keeps_cache` a version goes on with the keys and values of those before, else it computes all."""
    ids, begin, cache, found = torch.tensor([list(tokens)]), start, None, []
    for version, drawn in groupby(versions):
        end = begin + len(list(drawn))
        read = 0 if cache is None else cache.get_seq_length()
        output = models[version](input_ids=ids[:, read : end - 1], cache=cache, use_cache=keeps_cache)
        cache = output.past_key_values
        logprobs = output.logits[0, begin - 1 - read :].log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, begin:end, None])[:, 0])
        begin = end
    return torch.cat(found).numpy()


def check(
    trajectories: Sequence[AgentTrajectory], recorder: Recorder, models: Models, *, keeps_cache: bool = False
) -> None:
    """Compare what was recorded with what the engine returned, and that with the models."""
    turns = [(t, slice(turn.start, turn.stop)) for t in trajectories for turn in t.turns]
    fields = ("token_ids", "policy_versions", "behaviour_logprobs")
    recorded = Counter(
        (tuple(t.token_ids[: span.start].tolist()), *(getattr(t, f)[span].tobytes() for f in fields))
        for t, span in turns
    )
    returned = Counter(
        (context, *(part.tobytes() for part in (g.token_ids, g.policy_versions, g.logprobs)))
        for context, g in recorder.returned
    )
    assert recorded == returned
    for t, span in turns:
        assert t.loss_mask[span].all()
        versions, tokens = t.policy_versions[span].tolist(), t.token_ids[: span.stop].tolist()
        expected = replayed(models, tokens, span.start, versions, keeps_cache=keeps_cache)
        np.testing.assert_allclose(t.behaviour_logprobs[span], expected, rtol=0, atol=MOST_NATS)
    assert all(int(t.loss_mask.sum()) == sum(u.stop - u.start for u in t.turns) for t in trajectories)


def calculator(**settings):
    return build_environment(ToolsConfig(type="tools", tools=({"type": "calculator"},), **settings))


def answers(trajectory: AgentTrajectory) -> list[str]:
    return [TOKENIZER.decode(trajectory.token_ids[turn.start : turn.stop]) for turn in trajectory.turns]


async def test_chats_with_a_tool_reason_call_it_and_read_its_results(server):
    models = {0: chat_model(0)}
    await server.load_weights(models[0].state_dict(), 0)
    recorder, environment = Recorder(server), calculator(max_turns=6)
    policy = policy_on(recorder)
    episodes = await asyncio.gather(*(environment.run(TASK, policy.fresh(f"t{n}")) for n in range(12)))
    counts = Counter()
    for episode in episodes:
        [trajectory] = episode.trajectories
        calls = 0
        *before, last = answers(trajectory)
        follows = [turn.start for turn in trajectory.turns[1:]]
        for number, (answer, follow) in enumerate(zip(before, follows, strict=True)):
            told = TOKENIZER.decode(trajectory.token_ids[trajectory.turns[number].stop : follow])
            reasoning, _, call = answer.partition("</think>")
            assert reasoning.removeprefix("<think>").isalpha()
            digit = call.removeprefix('<tool_call>{"name": "calculator", "arguments": {"expression": "')[0]
            calls += digit.isdigit()
            result = f"<tool_response>\n{int(digit) * 7}\n" if digit.isdigit() else "this is no tool call"
            assert result in told
        done = last.endswith("</think>done<|im_end|>")
        assert (trajectory.end, trajectory.reward) == (("completed", 1.0) if done else ("turn_limit", 0.0))
        assert trajectory.metadata["tool_calls"] == calls
        counts.update(calls=calls, malformed=trajectory.metadata["malformed_calls"])
    assert counts["calls"] > 0
    check([t for episode in episodes for t in episode.trajectories], recorder, models)


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.parametrize("pause", ["in_place", "retract"])
async def test_weights_change_within_a_turn_and_between_turns(server, pause, monkeypatch):
    monkeypatch.setattr(server, "_config", server._config.model_copy(update={"pause": pause}))
    models = {0: chat_model(0, **NEVER), 1: chat_model(1, called=1.0), 2: chat_model(2, called=0.0)}
    await server.load_weights(models[0].state_dict(), 0)

    async def swap():
        await server.load_weights(models[2].state_dict(), 2)

    recorder, environment = Recorder(server, swap), calculator()
    policy = policy_on(recorder)
    episodes = [asyncio.create_task(environment.run(TASK, policy.fresh(f"{pause}{n}"))) for n in range(2)]
    await in_flight(server, *episodes)
    await server.load_weights(models[1].state_dict(), 1)
    trajectories = [t for episode in await asyncio.gather(*episodes) for t in episode.trajectories]
    for trajectory in trajectories:
        first, *later = trajectory.turns
        drawn = trajectory.policy_versions[first.start : first.stop]
        assert [version for version, _ in groupby(drawn.tolist())][:2] == [0, 1]
        assert {v for u in later for v in trajectory.policy_versions[u.start : u.stop].tolist()} <= {2}
    assert max(len(t.turns) for t in trajectories) > 1
    check(trajectories, recorder, models, keeps_cache=pause == "in_place")


async def test_agents_of_an_episode_debate_while_weights_change(server):
    models = {0: chat_model(0, thought=0.02, called=0.0), 1: chat_model(1, called=0.0)}
    await server.load_weights(models[0].state_dict(), 0)

    async def swap():
        await server.load_weights(models[1].state_dict(), 1)

    recorder = Recorder(server, swap)
    environment = build_environment(DebateConfig(debaters=2, rounds=2, decided_by="self"))
    episode = await environment.run(TASK, policy_on(recorder))
    turns = {t.agent: len(t.turns) for t in episode.trajectories}
    assert turns == {"debater-1": 2, "debater-2": 2, "judge": 1}
    rewards = {t.agent: t.reward for t in episode.trajectories}
    assert rewards == {"debater-1": 1.0, "debater-2": 1.0, "judge": 0.0}
    versions = [t.policy_versions[u.start : u.stop].tolist() for t in episode.trajectories for u in t.turns]
    assert any(0 in drawn for drawn in versions)
    assert set(versions[1] + versions[3] + versions[4]) == {1}
    check(episode.trajectories, recorder, models, keeps_cache=True)


async def test_an_answer_that_was_aborted_goes_on_with_newer_weights_and_a_chat_after_it(server, monkeypatch):
    """The fleet ends what takes too long, and has it go on; an agent that aborts keeps what there is."""
    monkeypatch.setattr(server, "_config", server._config.model_copy(update={"pause": "retract"}))
    models = {0: chat_model(0, **NEVER), 1: chat_model(1, called=0.0)}
    aborted: list[str] = []
    monkeypatch.setattr(server, "abort", noted(server.abort, aborted, "abort"))
    fleet = await fleet_of(server, monkeypatch, FleetConfig(request_timeout_s=1.0))
    await fleet.load_weights(models[0].state_dict(), 0)
    recorder = Recorder(fleet)
    policy = policy_on(recorder, new=3500)
    chat = asyncio.create_task(policy.chat("one"))

    async def went_on():
        return bool(aborted) and await requests_at_the_worker(server) == 1

    await until(went_on, "the fleet to interrupt the request and go on", timeout_s=60.0)
    await fleet.load_weights(models[1].state_dict(), 1)
    answer = await chat
    assert (answer.finish_reason, answer.content) == ("stop", "done")
    await fleet.load_weights(models[0].state_dict(), 2)
    models[2] = models[0]
    messages = [{"role": "user", "content": "one"}, answer.message, {"role": "user", "content": "two"}]
    shorter = replace(policy.sampling, max_new_tokens=1000)  # the first answer has taken part of the context
    chat = asyncio.create_task(policy.chat(messages, sampling=shorter))
    await in_flight(server, chat)
    await fleet.abort(next(iter(fleet._pending_by_id)))
    partial = await chat
    assert (partial.finish_reason, len(partial.token_ids) > 0) == ("abort", True)
    await fleet.load_weights(models[1].state_dict(), 3)
    models[3] = models[1]
    messages += [partial.message, {"role": "user", "content": "three"}]
    last = await policy.chat(messages, sampling=shorter)
    await fleet.close()
    assert last.content == "done"
    [trajectory] = policy.trajectories(1.0)
    versions = [
        [version for version, _ in groupby(trajectory.policy_versions[u.start : u.stop].tolist())]
        for u in trajectory.turns
    ]
    assert versions == [[0, 1], [2], [3]]
    check([trajectory], recorder, models)


async def test_a_server_at_a_url_evaluates_exactly_the_versions_asked_for(server, tmp_path):
    """The user's own server, whose weights are put back by whoever uses it next."""
    models = {71: chat_model(1), 75: chat_model(2)}
    model = tmp_path / "model"
    models[71].config.save_pretrained(model)
    actors = ActorsConfig.model_validate({"evaluation": {"urls": [server.url]}})
    nats = NatsServer(tmp_path / "nats")
    await nats.start()
    try:
        async with Bus.connect(BusConfig(url=nats.url), "test", name="test") as bus:
            await ensure(bus.js, bus.topology, shards=1)
            await bus.create_keys()
            asked = [await published(bus, version, one) for version, one in models.items()]
            own = OwnEngine(beside_rollouts(actors, model, tmp_path, actor="a"), Blobs(bus))
            await refuse_unfit_servers(actors, model, Blobs(bus), asked[0], max_new_tokens=4000)
            with pytest.raises(ConfigError, match=r"takes contexts of \d+ tokens, .*max_new_tokens=4090"):
                await refuse_unfit_servers(actors, model, Blobs(bus), asked[0], max_new_tokens=4090)
            for policy in asked:
                recorder = Recorder(await own.with_weights(policy, asyncio.Event()))
                episode = await calculator().run(TASK, policy_on(recorder))
                check(episode.trajectories, recorder, models)
                versions = {g.policy_versions.min() for _, g in recorder.returned}
                assert versions == {policy.policy_version}
            await own.close()
    finally:
        await nats.kill()


async def fleet_of(server: SglangEngine, monkeypatch, config: FleetConfig) -> Fleet:
    """A fleet that has the shared server, and neither starts nor ends it."""

    async def lent():
        return None

    async def build():
        return server

    monkeypatch.setattr(server, "start", lent)
    monkeypatch.setattr(server, "close", lent)
    fleet = Fleet({"one": build}, config)
    await fleet.start()
    return fleet
