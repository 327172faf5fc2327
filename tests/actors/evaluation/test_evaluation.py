"""Held-out reward on the engines that roll out."""

import asyncio
from dataclasses import replace

import pytest

from actors.engines.base import Sampling
from actors.episodes.episode import Episode
from actors.evaluation import engines as evaluation_engines
from actors.evaluation.engines import RolloutEngines
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import EngineError, EngineLostError, HandBackError
from tests.actors import held_out
from tests.actors.engines.fleet.embedded_fleet import fleet_of
from tests.actors.held_out import PROMPTS, TIMEOUT_S, Recording, followed, published, until
from tests.actors.tiny import tiny_model
from tests.actors.weights.publications import publish

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


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


async def reached(follower, version, of=None):
    async with asyncio.timeout(TIMEOUT_S):
        await follower.at_least(version, of=of)


async def all_run(environment):
    return environment.busy == PROMPTS


async def busy_with(engine, requests):
    async def is_busy():
        return engine.running == requests

    await until(is_busy)


async def test_the_result_says_which_versions_drew_its_tokens(bus, evaluations, engine, follower, rollouts):
    environment = Recording()
    async with evaluations.evaluator(rollouts, environment):
        asked = await publish(bus, 3)
        await reached(follower, 3)
        engine.hold()
        await evaluations.ask(asked)
        await busy_with(engine, PROMPTS)
        await publish(bus, 5)
        await reached(follower, 5)
        engine.release()
        result = await evaluations.result()
    assert (result.policy_version, result.incarnation, result.drawn_by) == (3, "one", (3, 5))
    assert (min(environment.versions), max(environment.versions)) == (3, 5)
    assert (result.sampled, result.greedy, result.prompts) == (1.0, 1.0, PROMPTS)
    temperatures = [request.sampling.temperature for request in engine.requests]
    assert temperatures == [1.0] * PROMPTS + [0.0] * PROMPTS
    assert {request.lease_version for request in engine.requests} == {3}


async def test_no_server_is_asked_which_tokens_it_kept_of_answers_that_are_not_trained(
    bus, evaluations, engine, follower, rollouts, monkeypatch
):
    monkeypatch.setattr(held_out, "SAMPLED", Sampling(max_new_tokens=12, top_p=0.9, keep_masks=True))
    async with evaluations.evaluator(rollouts, Recording()):
        await evaluations.ask(await publish(bus, 3))
        await evaluations.result()
    assert {request.sampling.top_p for request in engine.requests} == {0.9}
    assert not any(request.sampling.keep_masks for request in engine.requests)


async def test_nothing_is_answered_by_a_version_older_than_the_one_asked_for(
    bus, evaluations, engine, follower, rollouts
):
    await publish(bus, 4)
    await reached(follower, 4)
    asked = await publish(bus, 5, announce=False)
    async with evaluations.evaluator(rollouts, Recording()):
        await evaluations.ask(asked)
        await until(lambda: evaluations.handed_out(1))
        assert not engine.requests
        await publish(bus, 6)
        result = await evaluations.result()
    assert (result.policy_version, result.drawn_by) == (5, (6, 6))


async def test_a_version_that_does_not_come_is_handed_to_others_with_the_reason(
    bus, engine, follower, rollouts, monkeypatch
):
    monkeypatch.setattr(evaluation_engines, "PATIENCE_S", 0.2)
    monkeypatch.setattr(evaluation_engines, "LOOK_S", 2 * TIMEOUT_S)
    await publish(bus, 4)
    await reached(follower, 4)
    asked = await publish(bus, 7, announce=False)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(HandBackError, match=r"version 7: after 0\.2 s .* still have version 4"):
            await rollouts.with_weights(asked, asyncio.Event())


async def test_an_evaluation_that_was_handed_back_is_answered_when_its_version_has_come(
    bus, evaluations, follower, rollouts, monkeypatch
):
    monkeypatch.setattr(evaluation_engines, "PATIENCE_S", 0.1)
    monkeypatch.setattr(evaluation_engines, "LOOK_S", 0.05)
    asked = await publish(bus, 7, announce=False)
    async with evaluations.evaluator(rollouts, Recording()):
        await evaluations.ask(asked)
        await until(lambda: evaluations.handed_out(3))
        await publish(bus, 7)
        assert (await evaluations.result()).drawn_by == (7, 7)
    await evaluations.settled()


async def test_what_a_dead_learner_asked_for_is_forgotten_and_its_successor_is_answered(
    bus, evaluations, engine, follower, rollouts
):
    async with evaluations.evaluator(rollouts, Recording()):
        await publish(bus, 9, incarnation="dead")
        await reached(follower, 9, of="dead")
        gone = await publish(bus, 10, incarnation="dead", announce=False)
        asked = await publish(bus, 5, incarnation="resumed")
        await evaluations.ask(gone)
        await evaluations.ask(asked)
        result = await evaluations.result()
    assert (result.incarnation, result.policy_version, result.drawn_by) == ("resumed", 5, (5, 5))
    await evaluations.settled()
    assert evaluations.results.empty()


async def test_no_result_mixes_in_the_older_weights_of_a_resumed_learner(
    bus, evaluations, engine, follower, rollouts
):
    async with evaluations.evaluator(rollouts, Recording()):
        asked = await publish(bus, 5)
        await reached(follower, 5)
        engine.hold()
        await evaluations.ask(asked)
        await busy_with(engine, PROMPTS)
        resumed = await publish(bus, 3, incarnation="resumed")
        await reached(follower, 3, of="resumed")
        engine.release()
        await evaluations.settled()
        await evaluations.ask(resumed)
        assert (await evaluations.result()).drawn_by == (3, 3)
    assert evaluations.results.empty()


async def test_an_actor_that_stops_leaves_the_prompts_it_did_not_begin_to_another(
    bus, evaluations, engine, follower
):
    asked = await publish(bus, 1)
    await reached(follower, 1)
    first, second = Recording(), Recording()
    engines = RolloutEngines(bus, engine, follower, prompts_at_once=2)
    engine.hold()
    async with evaluations.evaluator(engines, first) as (stop, running):
        await evaluations.ask(asked)
        await busy_with(engine, 2)
        stop.set()
        engine.release()
        async with asyncio.timeout(TIMEOUT_S):
            await running
    assert (first.runs, first.busy, engine.running) == (2, 0, 0)
    assert not await evaluations.no_task_is_left()
    async with evaluations.evaluator(engines, second):
        assert (await evaluations.result()).drawn_by == (1, 1)
    assert second.runs == 2 * PROMPTS
    assert evaluations.results.empty()


async def test_begun_prompts_that_take_too_long_after_the_stop_are_left_to_another_actor(
    bus, evaluations, follower, rollouts
):
    async def a_slow_tool(_):
        await asyncio.Event().wait()

    asked = await publish(bus, 1)
    await reached(follower, 1)
    first, second = Recording(a_slow_tool), Recording()
    async with evaluations.evaluator(rollouts, first, finish_within_s=0.01):
        await evaluations.ask(asked)
        await until(lambda: all_run(first))
    assert first.busy == 0
    async with evaluations.evaluator(rollouts, second):
        assert (await evaluations.result()).drawn_by == (1, 1)
    assert evaluations.results.empty()


async def test_an_actor_that_stops_while_the_version_is_on_its_way_leaves_the_evaluation_to_another(
    bus, evaluations, engine, follower, rollouts
):
    asked = await publish(bus, 2, announce=False)
    async with evaluations.evaluator(rollouts, Recording()):
        await evaluations.ask(asked)
        await until(lambda: evaluations.handed_out(1))
    assert not await evaluations.no_task_is_left()
    assert not engine.requests


async def test_rollouts_wait_for_no_more_prompts_than_are_allowed_at_once(bus, evaluations, engine, follower):
    asked = await publish(bus, 1)
    await reached(follower, 1)
    environment = Recording()
    engines = RolloutEngines(bus, engine, follower, prompts_at_once=3)
    async with evaluations.evaluator(engines, environment):
        await evaluations.ask(asked)
        await evaluations.result()
    assert (environment.most_busy, environment.runs) == (3, 2 * PROMPTS)


async def test_what_fell_behind_is_answered_by_one_measurement_and_the_newest_version_alone(
    bus, evaluations, engine, follower, rollouts
):
    environment = Recording()
    asked = [await publish(bus, version) for version in (1, 2, 3, 4)]
    await reached(follower, 4)
    engine.hold()
    async with evaluations.evaluator(rollouts, environment):
        for manifest in asked:
            await evaluations.ask(manifest)
        await busy_with(engine, PROMPTS)
        asked.append(await publish(bus, 5))
        await reached(follower, 5)
        engine.release()
        await evaluations.ask(asked[-1])
        results = [await evaluations.result() for _ in asked]
    assert [(r.policy_version, r.drawn_by) for r in results] == [
        (1, (4, 5)), (2, (4, 5)), (3, (4, 5)), (4, (4, 5)), (5, (5, 5)),
    ]  # fmt: skip
    assert environment.runs == 4 * PROMPTS


@pytest.mark.parametrize("other", ["learner", "prompts"])
async def test_no_measurement_answers_for_another_learner_or_for_other_prompts(
    bus, evaluations, engine, follower, rollouts, other
):
    environment = Recording()
    async with evaluations.evaluator(rollouts, environment):
        await evaluations.ask(await publish(bus, 5))
        await evaluations.result()
        resumed = await publish(bus, 5, incarnation="resumed" if other == "learner" else "one")
        await evaluations.ask(resumed, prompts=PROMPTS if other == "learner" else 2)
        result = await evaluations.result()
    assert (result.incarnation, result.prompts) == (
        ("resumed", PROMPTS) if other == "learner" else ("one", 2)
    )
    assert environment.runs == 2 * PROMPTS + 2 * result.prompts


async def test_a_measurement_with_failed_rollouts_answers_for_no_other_version(
    bus, evaluations, follower, rollouts
):
    async def fail(run):
        if run == 1:
            raise EngineError("this prompt ends its engines")

    asked = [await publish(bus, version) for version in (1, 2)]
    await reached(follower, 2)
    async with evaluations.evaluator(rollouts, Recording(fail)):
        for manifest in asked:
            await evaluations.ask(manifest)
        results = [await evaluations.result() for _ in asked]
    assert [(r.policy_version, r.drawn_by, r.failed) for r in results] == [(1, (2, 2), 1), (2, (2, 2), 0)]


async def test_a_rollout_that_fails_is_counted_and_says_nothing_about_the_policy(
    bus, evaluations, follower, rollouts
):
    async def fail(run):
        if run in (1, PROMPTS + 1, PROMPTS + 2):
            raise EngineError("this prompt ends its engines")

    asked = await publish(bus, 1)
    async with evaluations.evaluator(rollouts, Recording(fail)):
        await evaluations.ask(asked)
        result = await evaluations.result()
    assert (result.sampled, result.greedy, result.failed) == (1.0, 1.0, 3)


async def test_what_a_tool_broke_is_a_failure_and_no_wrong_answer(bus, evaluations, follower, rollouts):
    class Breaking(Recording):
        async def run(self, task, policy):
            is_first = self.runs == 0
            episode = await super().run(task, policy)
            if not is_first:
                return episode
            return Episode(
                tuple(replace(part, end="tool_error", reward=0.0) for part in episode.trajectories)
            )

    async with evaluations.evaluator(rollouts, Breaking()):
        await evaluations.ask(await publish(bus, 1))
        result = await evaluations.result()
    assert (result.sampled, result.greedy, result.failed) == (1.0, 1.0, 1)


@pytest.mark.parametrize("failing", [range(1, 2 * PROMPTS + 1), range(1, PROMPTS)], ids=["all", "most"])
async def test_nothing_is_told_where_most_rollouts_failed_and_the_next_version_is_measured(
    bus, evaluations, follower, rollouts, failing
):
    async def fail(run):
        if run in failing:
            raise EngineError("engines that answer nothing")

    async with evaluations.evaluator(rollouts, Recording(fail)):
        await evaluations.ask(await publish(bus, 1))
        await evaluations.settled()
        await evaluations.ask(await publish(bus, 2))
        result = await evaluations.result()
    assert (result.policy_version, result.sampled, result.failed) == (2, 1.0, 0)
    assert evaluations.results.empty()


async def test_what_cancels_a_held_out_rollout_by_itself_fails_that_rollout_alone(
    bus, evaluations, follower, rollouts
):
    async def cancel(run):
        if run == 1:
            raise asyncio.CancelledError

    async with evaluations.evaluator(rollouts, Recording(cancel)):
        await evaluations.ask(await publish(bus, 1))
        assert (await evaluations.result()).failed == 1


async def test_without_engines_the_evaluator_ends_and_its_task_is_left_for_others(
    bus, evaluations, follower, rollouts
):
    async def lose(run):
        raise EngineLostError("all engines failed")

    asked = await publish(bus, 1)
    async with evaluations.evaluator(rollouts, Recording(lose), fails=True) as (_, running):
        await evaluations.ask(asked)
        await asyncio.wait([running], timeout=TIMEOUT_S)
    assert running.exception().subgroup(EngineLostError)
    assert not await evaluations.no_task_is_left()


async def test_the_range_of_real_engines_is_that_of_their_tokens_across_a_turn_of_the_learner(
    bus, evaluations, state
):
    """As with colocation: the engines leave the device in the midst, and come back with newer weights."""
    async with fleet_of("one", "two", state=state) as (fleet, _), followed(bus, fleet) as follower:

        async def take_the_device(run):
            if run == 3:
                await fleet.release()
                await published(bus, 2, tiny_model("qwen3", seed=2))
                await reached(follower, 2)
                await fleet.resume()

        environment = Recording(take_the_device)
        asked = await published(bus, 1, tiny_model("qwen3", seed=1))
        engines = RolloutEngines(bus, fleet, follower, prompts_at_once=2)
        async with evaluations.evaluator(engines, environment):
            await evaluations.ask(asked)
            result = await evaluations.result()
    assert result.drawn_by == (min(environment.versions), max(environment.versions)) == (1, 2)


async def test_whatever_an_environment_raises_costs_its_answer_alone(bus, evaluations, follower, rollouts):
    async def failing(run):
        if run == 1:
            raise OSError("no space")

    async with evaluations.evaluator(rollouts, Recording(failing)):
        asked = await publish(bus, 3)
        await evaluations.ask(asked)
        result = await evaluations.result()
    assert (result.failed, result.sampled, result.greedy) == (1, 1.0, 1.0)


class AgainstAnother:
    """Has an opponent that moves first; the outcome is a tenth of what the policy's own part would say."""

    trajectories_per_episode = None

    async def run(self, task, policy):
        assert task.heldout
        policy = policy.fresh(task.task_id)
        await policy.chat("a", "opponent", policy="past")
        await policy.chat(task.messages)
        return Episode(policy.trajectories(1.0), outcome=0.1)


async def test_an_opponents_older_version_does_not_count_and_the_outcome_is_what_counts(
    bus, evaluations, engine, follower, rollouts
):
    past = ScriptedEngine(lambda tokens: [6] * 4, policy_version=1)
    async with evaluations.evaluator(rollouts, AgainstAnother(), opponents={"past": past}):
        asked = await publish(bus, 3)
        await reached(follower, 3)
        await evaluations.ask(asked)
        result = await evaluations.result()
    assert result.drawn_by == (3, 3)
    assert (result.sampled, result.greedy) == (pytest.approx(0.1), pytest.approx(0.1))
    assert len(past.requests) == len(engine.requests) == 2 * PROMPTS


class WithCritic:
    """A critic answers what the policy has answered."""

    trajectories_per_episode = 2

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        answer = await policy.chat(task.messages)
        await policy.chat(answer.text, "critic")
        return Episode(policy.trajectories(1.0))


async def test_further_policies_answer_with_their_newest_weights_and_their_versions_do_not_count(
    bus, evaluations, engine, follower, rollouts
):
    critic = ScriptedEngine(lambda tokens: [6] * 4, policy_version=17)
    further, agents = {"second": critic}, {"critic": "second"}
    async with evaluations.evaluator(rollouts, WithCritic(), further=further, agents=agents):
        asked = await publish(bus, 3)
        await reached(follower, 3)
        await evaluations.ask(asked)
        result = await evaluations.result()
    assert (result.drawn_by, result.failed) == ((3, 3), 0)
    assert len(critic.requests) == len(engine.requests) == 2 * PROMPTS
