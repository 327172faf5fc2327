"""Held-out accuracy on the engines that roll out, and on one of its own."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from safetensors.torch import save

from actors import evaluation_engines
from actors.config import ActorsConfig, EmbeddedEngineConfig, EvaluatorConfig, SglangEngineConfig
from actors.engines.base import Sampling
from actors.engines.embedded import EmbeddedEngine
from actors.engines.scripted import ScriptedEngine
from actors.environments.base import Episode
from actors.evaluation import Evaluator
from actors.evaluation_engines import OwnEngine, RolloutEngines
from actors.weights import PolicyFollower
from bus.blobs import delete_blob, put_blob
from bus.codec import encode
from bus.errors import EngineError, EngineLostError, HandBackError
from bus.messages import EvaluationResult, EvaluationTask, PolicyManifest, Prompt, PromptSet
from bus.publish import Publisher
from learner.scratch import character_tokenizer
from storage.blob_sources import Blobs
from tests.actors.test_fleet_embedded import fleet_of, state  # noqa: F401
from tests.actors.test_weights import publish
from tests.actors.tiny import tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
TIMEOUT_S = 30
TOKENIZER = character_tokenizer()
SAMPLED = Sampling(max_new_tokens=12)
PROMPTS = 4


class Recording:
    """Asks once; the reward is 1. Remembers the versions of all tokens, and what `meanwhile` is to happen."""

    trajectories_per_episode = 1

    def __init__(self, meanwhile=None):
        self.runs = self.busy = self.most_busy = 0
        self.versions = []
        self._meanwhile = meanwhile

    async def run(self, task, policy):
        self.runs += 1
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            if self._meanwhile is not None:
                await self._meanwhile(self.runs)
            policy = policy.fresh(task.task_id)
            await policy.chat(task.messages)
        finally:
            self.busy -= 1
        [trajectory] = trajectories = policy.trajectories(1.0)
        self.versions += trajectory.policy_versions[trajectory.loss_mask].tolist()
        return Episode(trajectories=trajectories)


class Desk:
    """Asks for evaluations as a learner does, and has evaluators answer."""

    def __init__(self, bus):
        self.bus = bus
        self.results = asyncio.Queue()

    async def listen(self):
        await self.bus.listen(
            self.bus.subject("events", "evaluation"), EvaluationResult, self.results.put_nowait
        )

    async def ask(self, manifest):
        prompts = PromptSet(prompts=tuple(Prompt(content=str(n)) for n in range(PROMPTS)))
        ref = await put_blob(self.bus, Publisher(self.bus), encode(prompts), "heldout")
        task, name = EvaluationTask(policy=manifest, prompts=ref), f"{manifest.incarnation}-{manifest}"
        await Publisher(self.bus).publish(
            self.bus.subject("tasks", "evaluation"), encode(task), message_id=name
        )

    async def result(self):
        async with asyncio.timeout(TIMEOUT_S):
            return await self.results.get()

    async def settled(self):
        """Return when no task is left."""
        await until(self.no_task_is_left)

    async def no_task_is_left(self):
        return (await self.bus.js.stream_info(self.bus.topology.stream("TASKS"))).state.messages == 0

    async def handed_out(self, times):
        info = await self.bus.js.consumer_info(self.bus.topology.stream("TASKS"), "evaluation")
        return info.delivered.consumer_seq >= times

    @asynccontextmanager
    async def evaluator(self, engines, environment, *, fails=False):
        """An evaluator at work, its end awaited; yields what stops it, and its task."""
        working = Evaluator(
            self.bus, engines, TOKENIZER, environment,
            sampled=SAMPLED, greedy=replace(SAMPLED, temperature=0.0),
        )  # fmt: skip
        stop = asyncio.Event()
        running = asyncio.create_task(working.run(stop))
        try:
            yield stop, running
        finally:
            stop.set()
            await asyncio.wait([running], timeout=TIMEOUT_S)
            assert running.done(), "the evaluator did not end"
            assert working.doing == ""
        assert running.exception() is None or fails


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - servers and engines have no event for it
            await asyncio.sleep(0.02)


@asynccontextmanager
async def followed(bus, engine):
    follower, stop = PolicyFollower(bus, engine), asyncio.Event()
    running = asyncio.create_task(follower.run(stop))
    try:
        yield follower
    finally:
        stop.set()
        await asyncio.wait([running], timeout=TIMEOUT_S)
        running.result()


async def published(bus, version, model):
    """Weights that a real engine can load."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    snapshot = await put_blob(bus, Publisher(bus), save(tensors), "weights", version)
    manifest = PolicyManifest(
        policy_version=version, incarnation="one", snapshot=snapshot, model=snapshot, stage="rl"
    )
    await bus.put("policy", manifest)
    await bus.notify(bus.subject("notice", "policy"), manifest)
    return manifest


@pytest.fixture
async def desk(bus):
    desk = Desk(bus)
    await desk.listen()
    return desk


@pytest.fixture
async def engine():
    """Answers every prompt with the same eight tokens; drawn half before it is held, half after."""
    engine = ScriptedEngine(lambda tokens: [5] * 8, policy_version=-1)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def follower(bus, engine):
    async with followed(bus, engine) as follower:
        yield follower


@pytest.fixture
def rollouts(bus, engine, follower):
    return RolloutEngines(bus, engine, follower, prompts_at_once=64)


async def busy_with(engine, requests):
    async def is_busy():
        return engine.running == requests

    await until(is_busy)


# --- on the engines that roll out ---


async def test_the_result_says_which_versions_drew_its_tokens(bus, desk, engine, follower, rollouts):
    environment = Recording()
    async with desk.evaluator(rollouts, environment):
        asked = await publish(bus, 3)
        await follower.at_least(3)
        engine.hold()
        await desk.ask(asked)
        await busy_with(engine, PROMPTS)
        await publish(bus, 5)
        await follower.at_least(5)
        engine.release()
        result = await desk.result()
    assert (result.policy_version, result.incarnation, result.drawn_by) == (3, "one", (3, 5))
    assert (min(environment.versions), max(environment.versions)) == (3, 5)
    assert (result.sampled, result.greedy, result.prompts) == (1.0, 1.0, PROMPTS)
    temperatures = [request.sampling.temperature for request in engine.requests]
    assert temperatures == [1.0] * PROMPTS + [0.0] * PROMPTS


async def test_nothing_is_answered_by_a_version_older_than_the_one_asked_for(
    bus, desk, engine, follower, rollouts
):
    await publish(bus, 4)
    await follower.at_least(4)
    asked = await publish(bus, 5, announce=False)
    async with desk.evaluator(rollouts, Recording()):
        await desk.ask(asked)
        await until(lambda: desk.handed_out(1))
        assert not engine.requests
        await publish(bus, 6)
        result = await desk.result()
    assert (result.policy_version, result.drawn_by) == (5, (6, 6))


async def test_a_version_that_does_not_come_is_handed_to_others_with_the_reason(
    bus, engine, follower, rollouts, monkeypatch
):
    monkeypatch.setattr(evaluation_engines, "PATIENCE_S", 0.2)
    await publish(bus, 4)
    await follower.at_least(4)
    asked = await publish(bus, 7, announce=False)
    with pytest.raises(HandBackError, match=r"version 7: after 0\.2 s .* still have version 4"):
        await rollouts.with_weights(asked, asyncio.Event())


async def test_an_evaluation_that_was_handed_back_is_answered_when_its_version_has_come(
    bus, desk, follower, rollouts, monkeypatch
):
    monkeypatch.setattr(evaluation_engines, "PATIENCE_S", 0.1)
    monkeypatch.setattr(evaluation_engines, "LOOK_S", 0.05)
    asked = await publish(bus, 7, announce=False)
    async with desk.evaluator(rollouts, Recording()):
        await desk.ask(asked)
        await until(lambda: desk.handed_out(3))
        await publish(bus, 7)
        assert (await desk.result()).drawn_by == (7, 7)
    await desk.settled()


async def test_what_a_dead_learner_asked_for_is_forgotten_and_its_successor_is_answered(
    bus, desk, engine, follower, rollouts
):
    async with desk.evaluator(rollouts, Recording()):
        await publish(bus, 9, incarnation="dead")
        await follower.at_least(9, of="dead")
        gone = await publish(bus, 10, incarnation="dead", announce=False)
        asked = await publish(bus, 5, incarnation="resumed")
        await desk.ask(gone)
        await desk.ask(asked)
        result = await desk.result()
    assert (result.incarnation, result.policy_version, result.drawn_by) == ("resumed", 5, (5, 5))
    await desk.settled()
    assert desk.results.empty()


async def test_no_result_mixes_in_the_older_weights_of_a_resumed_learner(
    bus, desk, engine, follower, rollouts
):
    async with desk.evaluator(rollouts, Recording()):
        asked = await publish(bus, 5)
        await follower.at_least(5)
        engine.hold()
        await desk.ask(asked)
        await busy_with(engine, PROMPTS)
        resumed = await publish(bus, 3, incarnation="resumed")
        await follower.at_least(3, of="resumed")
        engine.release()
        await desk.settled()
        await desk.ask(resumed)
        assert (await desk.result()).drawn_by == (3, 3)
    assert desk.results.empty()


async def test_an_actor_that_stops_leaves_the_prompts_it_did_not_begin_to_another(
    bus, desk, engine, follower
):
    asked = await publish(bus, 1)
    await follower.at_least(1)
    first, second = Recording(), Recording()
    engines = RolloutEngines(bus, engine, follower, prompts_at_once=2)
    engine.hold()
    async with desk.evaluator(engines, first) as (stop, running):
        await desk.ask(asked)
        await busy_with(engine, 2)
        stop.set()
        engine.release()
        async with asyncio.timeout(TIMEOUT_S):
            await running
    assert (first.runs, first.busy, engine.running) == (2, 0, 0)
    assert not await desk.no_task_is_left()
    async with desk.evaluator(engines, second):
        assert (await desk.result()).drawn_by == (1, 1)
    assert second.runs == 2 * PROMPTS
    assert desk.results.empty()


async def test_an_actor_that_stops_while_the_version_is_on_its_way_leaves_the_evaluation_to_another(
    bus, desk, engine, follower, rollouts
):
    asked = await publish(bus, 2, announce=False)
    async with desk.evaluator(rollouts, Recording()):
        await desk.ask(asked)
        await until(lambda: desk.handed_out(1))
    assert not await desk.no_task_is_left()
    assert not engine.requests


async def test_rollouts_wait_for_no_more_prompts_than_are_allowed_at_once(bus, desk, engine, follower):
    asked = await publish(bus, 1)
    await follower.at_least(1)
    environment = Recording()
    engines = RolloutEngines(bus, engine, follower, prompts_at_once=3)
    async with desk.evaluator(engines, environment):
        await desk.ask(asked)
        await desk.result()
    assert (environment.most_busy, environment.runs) == (3, 2 * PROMPTS)


async def test_what_fell_behind_is_answered_by_one_measurement_of_the_newest_version(
    bus, desk, engine, follower, rollouts
):
    environment = Recording()
    asked = [await publish(bus, version) for version in (1, 2, 3)]
    await follower.at_least(3)
    async with desk.evaluator(rollouts, environment):
        for manifest in asked:
            await desk.ask(manifest)
        results = [await desk.result() for _ in asked]
        assert environment.runs == 2 * PROMPTS
        other = await publish(bus, 4)
        await desk.ask(other)
        results.append(await desk.result())
    assert [(r.policy_version, r.drawn_by) for r in results] == [
        (1, (3, 3)), (2, (3, 3)), (3, (3, 3)), (4, (4, 4)),
    ]  # fmt: skip
    assert environment.runs == 4 * PROMPTS


async def test_a_rollout_that_fails_counts_as_zero_and_the_others_count(bus, desk, follower, rollouts):
    async def fail(run):
        if run in (1, PROMPTS + 1, PROMPTS + 2):
            raise EngineError("this prompt ends its engines")

    asked = await publish(bus, 1)
    async with desk.evaluator(rollouts, Recording(fail)):
        await desk.ask(asked)
        result = await desk.result()
    assert (result.sampled, result.greedy) == (0.75, 0.5)


async def test_without_engines_the_evaluator_ends_and_its_task_is_left_for_others(
    bus, desk, follower, rollouts
):
    async def lose(run):
        raise EngineLostError("all engines failed")

    asked = await publish(bus, 1)
    async with desk.evaluator(rollouts, Recording(lose), fails=True) as (_, running):
        await desk.ask(asked)
        await asyncio.wait([running], timeout=TIMEOUT_S)
    assert running.exception().subgroup(EngineLostError)
    assert not await desk.no_task_is_left()


async def test_the_range_of_real_engines_is_that_of_their_tokens_across_a_turn_of_the_learner(
    bus,
    desk,
    state,  # noqa: F811
):
    """As with colocation: the engines leave the device in the midst, and come back with newer weights."""
    async with fleet_of("one", "two", state=state) as (fleet, _), followed(bus, fleet) as follower:

        async def take_the_device(run):
            if run == 3:
                await fleet.release()
                await published(bus, 2, tiny_model("qwen3", seed=2))
                await follower.at_least(2)
                await fleet.resume()

        environment = Recording(take_the_device)
        asked = await published(bus, 1, tiny_model("qwen3", seed=1))
        engines = RolloutEngines(bus, fleet, follower, prompts_at_once=2)
        async with desk.evaluator(engines, environment):
            await desk.ask(asked)
            result = await desk.result()
    assert result.drawn_by == (min(environment.versions), max(environment.versions)) == (1, 2)


# --- on an engine of its own ---


async def test_an_own_engine_keeps_the_version_while_others_are_published(bus, desk, model):
    async def publish_another(run):
        await published(bus, 1 + run, tiny_model("qwen3", seed=run))

    built = []

    def build():
        built.append(EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0)))
        return built[-1]

    environment = Recording(publish_another)
    async with desk.evaluator(OwnEngine(build, Blobs(bus)), environment):
        asked = await published(bus, 1, model)
        await desk.ask(asked)
        first = await desk.result()
        await desk.ask(await published(bus, 50, tiny_model("qwen3", seed=3)))
        second = await desk.result()
    assert (first.drawn_by, second.drawn_by) == ((1, 1), (50, 50))
    assert set(environment.versions) == {1, 50}
    assert len(built) == 1
    assert not built[0]._thread.is_alive()


async def test_an_own_engine_skips_a_version_whose_weights_are_gone(bus, desk):
    def build():
        raise AssertionError("there is nothing to load")

    gone = await publish(bus, 1)
    await delete_blob(bus, gone.snapshot)
    async with desk.evaluator(OwnEngine(build, Blobs(bus)), Recording()):
        await desk.ask(gone)
        await desk.settled()
    assert desk.results.empty()


# --- which of the two ---


@pytest.mark.parametrize(
    ("engine", "chosen", "expected"),
    [
        (EmbeddedEngineConfig(), None, "own"),
        (SglangEngineConfig(), None, "rollout"),
        (EmbeddedEngineConfig(), "rollout", "rollout"),
        (SglangEngineConfig(), "own", "own"),
    ],
)
def test_servers_evaluate_themselves_unless_the_settings_say_otherwise(engine, chosen, expected):
    config = ActorsConfig(engine=engine, evaluation=EvaluatorConfig(engine=chosen))
    assert config.evaluates_on == expected
