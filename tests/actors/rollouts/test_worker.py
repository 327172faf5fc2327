import asyncio
from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from actors.environments import sample_calls
from actors.environments.plugin import PluginEnvironment
from actors.environments.sample_calls import FirstCalls
from actors.environments.single_turn import SingleTurn
from actors.rewards.base import LATER, RewardError
from actors.rewards.scoring.scorers import Scorer
from actors.settings.actors import ActorsConfig, SingleTurnConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.errors import ConfigError, EngineError, EngineLostError
from bus.messages import Prompt
from bus.streams.publish import Publisher
from tests.actors.rollouts.whole_actor import GROUPS, REJECTED, TIMEOUT_S, TOKENIZER, Actor, answer_with, leaf
from tests.factories import make_lease

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


@pytest.fixture
async def engine():
    engine = ScriptedEngine(answer_with("0"), policy_version=4)
    await engine.start()
    yield engine
    await engine.close()


async def test_a_lease_becomes_one_group_on_its_shard_and_is_acked(bus, engine):
    actor = Actor(bus, engine)
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    group = batch.trajectories
    assert [t.trajectory_id for t in group] == ["g00000000.0", "g00000000.1", "g00000000.2"]
    assert {(t.group_size, t.reward, t.oldest_version, t.actor) for t in group} == {(3, 1.0, 4, "tester")}
    assert TOKENIZER.decode(group[0].token_ids[group[0].loss_mask]) == "0<|end|>"
    assert [request.lease_version for request in engine.requests] == [4] * 3
    assert await actor.leases_left() == 0


async def test_trajectories_name_the_source_and_the_task_of_their_prompt(bus, engine):
    lease = make_lease(0, samples=1, policy_version=4)
    lease = replace(lease, prompt=replace(lease.prompt, metadata={"source": "tables", "id": 7, "other": 1}))
    [batch] = await Actor(bus, engine).roll_out(lease, result=GROUPS)
    assert [t.metadata for t in batch.trajectories] == [{"source": "tables", "id": 7}]


async def test_a_redelivered_lease_gives_the_same_ids_so_nothing_is_stored_twice(bus, engine):
    lease = make_lease(0, samples=2, policy_version=4)
    [first] = await Actor(bus, engine).roll_out(lease, result=GROUPS)
    await Publisher(bus).publish(bus.subject("tasks", "rollout"), encode(lease), message_id="again")
    actor, stop = Actor(bus, engine), asyncio.Event()
    working = asyncio.create_task(actor.worker.run(stop, groups_at_once=1))
    async with asyncio.timeout(TIMEOUT_S):
        while await actor.leases_left():  # noqa: ASYNC110 - a server's state
            await asyncio.sleep(0.02)
        stop.set()
        await working
    state = (await bus.js.stream_info(bus.topology.stream("TRAJECTORIES"))).state
    assert state.last_seq == 1  # the bus took the second for the duplicate it is
    assert first.trajectories[0].trajectory_id == "g00000000.0"


async def test_that_storage_does_not_answer_is_told_once_for_all_leases(bus, engine, monkeypatch):
    monkeypatch.setattr("actors.rollouts.leases.UNANSWERED_LOG_PERIOD_S", 3600.0)
    leases = [replace(make_lease(n, samples=1, policy_version=4), republished=True) for n in (0, 2, 4, 6)]
    with capture_logs() as logs:
        await Actor(bus, engine).roll_out(*leases, result=GROUPS)
    told = [line for line in logs if line["event"] == "lease_state_not_known"]
    assert [(line["times"], line["log_level"]) for line in told] == [(1, "warning")]


async def test_a_group_of_equal_rewards_is_rejected_with_a_countable_reason(bus, engine):
    actor = Actor(bus, engine, keep="zero_variance")
    [rejection] = await actor.roll_out(make_lease(2, samples=2, policy_version=4), result=REJECTED)
    assert (rejection.lease_id, rejection.reason, rejection.actor) == (2, "zero_variance", "tester")
    assert actor.worker.sampled == (2, 4, 2, 0.0)  # "0<|end|>" twice, which nobody trains on
    assert await actor.leases_left() == 0


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (lambda rewards: 1 / 0, "ZeroDivisionError"),
        (lambda rewards: False, "False"),
        (lambda rewards: "", "''"),
    ],
)
async def test_a_filter_that_fails_rejects_its_group_and_ends_nothing(bus, engine, keep, why):
    actor = Actor(bus, engine)
    actor.worker._keep = keep
    leases = [make_lease(n, samples=2, policy_version=4) for n in (0, 2)]
    found = await actor.roll_out(*leases, result=REJECTED)
    assert {(rejection.lease_id, rejection.reason) for rejection in found} == {
        (0, "filter_failed"),
        (2, "filter_failed"),
    }
    assert why in found[0].detail
    assert await actor.leases_left() == 0


async def test_a_group_whose_reward_comes_later_is_published_without_it_and_past_the_filter(bus, engine):
    environment = SingleTurn(Scorer("later", timeout_s=60, reward=lambda answer: LATER))
    actor = Actor(bus, engine, environment, keep="zero_variance")
    lease = replace(make_lease(2, samples=2, policy_version=4), run="ours")
    [batch] = await actor.roll_out(lease, result=GROUPS)
    assert [(t.reward, t.reward_due, t.run) for t in batch.trajectories] == [(0.0, True, "ours")] * 2
    assert actor.worker.counts["groups_with_rewards_due"] == 1
    assert actor.worker.sampled == (2, 4, 0, 0.0)


async def test_a_failing_reward_rejects_the_group_and_the_actor_goes_on(bus, engine):
    def fails_once(answer, calls=[]):  # noqa: B006 - remembers its calls
        calls.append(answer.task_id)
        return float("nan") if len(calls) == 1 else 1.0

    environment = SingleTurn(Scorer("fails_once", timeout_s=60, reward=fails_once))
    actor = Actor(bus, engine, environment)
    [rejection] = await actor.roll_out(make_lease(0, samples=1, policy_version=4), result=REJECTED)
    assert rejection.reason == "rollout_failed"
    assert "nan" in rejection.detail
    [batch] = await actor.roll_out(make_lease(4, samples=1, policy_version=4), result=GROUPS)
    assert batch.trajectories[0].reward == 1.0


async def test_a_reward_that_is_never_a_number_ends_the_run_and_shows_few_of_its_failures(
    bus, engine, monkeypatch
):
    monkeypatch.setattr("actors.environments.failures.MOST_INVALID_REWARDS", 6)
    answers = iter([None, {}, 1.0, *["0.5"] * 20])
    environment = SingleTurn(Scorer("wrong", timeout_s=60, reward=lambda _: next(answers)))
    actor = Actor(bus, engine, environment)
    for n in range(10):
        lease = encode(make_lease(n, samples=1, policy_version=4))
        await Publisher(bus).publish(bus.subject("tasks", "rollout"), lease, message_id=str(n))
    with capture_logs() as logs:
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ExceptionGroup) as found:
                await actor.worker.run(asyncio.Event(), groups_at_once=1)
    told = leaf(found.value.subgroup(ConfigError))
    assert "6 rewards in a row were none, the last: reward wrong on task g00000008.0 returned '0.5'" in told
    shown = [event for event in logs if event["event"] == "rollout_failed"]
    assert 1 <= len(shown) < 8
    assert shown[0]["prompt"]
    assert "returned None" in shown[0]["reason"]


@pytest.mark.slow
async def test_an_actor_that_is_started_by_itself_calls_a_reward_before_its_first_rollout(
    bus, engine, tmp_path, monkeypatch
):
    (tmp_path / "called_first.py").write_text("def score(answer):\n    return {}[answer.label]\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = SingleTurnConfig(reward="called_first:score")
    first_calls = FirstCalls(ActorsConfig(environment=reward))
    actor = Actor(bus, engine, SingleTurn.from_config(reward), first_calls=first_calls)
    lease = encode(make_lease(1, samples=1, policy_version=4))
    await Publisher(bus).publish(bus.subject("tasks", "rollout"), lease, message_id="1")
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as found:
            await actor.worker.run(asyncio.Event(), groups_at_once=1)
    told = leaf(found.value.subgroup(ConfigError))
    assert "a lease, prompt 1: the reward 'called_first:score' does not work" in told
    assert "return {}[answer.label]" in told
    assert not engine.requests


async def test_each_reward_is_called_once_however_many_leases_wait_for_it(monkeypatch):
    calls = []

    async def check(given):
        calls.extend((call.config.reward, call.name) for call in given)
        await asyncio.sleep(0)

    monkeypatch.setattr(sample_calls, "check_calls", check)
    environments = [
        {"name": "calc", "environment": {"type": "single_turn", "reward": "mine:one"}},
        {"name": "game", "environment": {"type": "single_turn", "reward": "mine:two"}},
    ]
    first = FirstCalls(ActorsConfig.model_validate({"environments": environments}))
    chosen = ["calc", "calc", "game", "gone", None]
    prompts = [Prompt(content="a", label="1", metadata={"environment": name}) for name in chosen]
    await asyncio.gather(*(first.of(prompt) for prompt in prompts))
    assert calls == [("mine:one", "mine:one"), ("mine:two", "mine:two")]


async def test_a_reward_that_the_run_does_not_allow_is_not_called_and_ends_no_actor(tmp_path, monkeypatch):
    (tmp_path / "not_allowed.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = FirstCalls(ActorsConfig(environment=SingleTurnConfig(reward="mine:one")))
    await first.of(Prompt(content="a", label="1", metadata={"reward": "not_allowed:score"}))
    assert not (tmp_path / "not_allowed.py.ran").exists()


class FailingFor:
    """An environment in which some samples of each group fail, each by its own exception."""

    trajectories_per_episode = 1

    def __init__(self, failures):
        self._failures = failures
        self._inner = SingleTurn.from_config(SingleTurnConfig(reward="exact"))

    async def run(self, task, policy):
        sample = int(task.task_id.rpartition(".")[2])
        if sample in self._failures:
            raise self._failures[sample]
        return await self._inner.run(task, policy)


async def test_failed_episodes_cost_themselves_and_say_how_they_ended(bus, engine):
    failures = {
        1: ZeroDivisionError("mine"),
        2: RewardError("the judge"),
        4: EngineError("it fell"),
        5: TimeoutError(),
    }
    actor = Actor(bus, engine, PluginEnvironment("mine:Env", FailingFor(failures)))
    with capture_logs() as logs:
        [batch] = await actor.roll_out(make_lease(0, samples=6, policy_version=4), result=GROUPS)
    found = {t.rollout: (t.end, len(t.token_ids) > 0, t.is_trained) for t in batch.trajectories}
    ends = "completed", "environment_error", "reward_error", "completed", "engine_error", "timeout"
    assert found == {n: (end, n in (0, 3), n in (0, 3)) for n, end in enumerate(ends)}
    assert {t.group_size for t in batch.trajectories} == {6}
    raised = "PluginFaultError: environment mine:Env raised ZeroDivisionError('mine') on task g00000000.1"
    assert batch.trajectories[1].metadata == {"failure": raised}
    [logged] = [line for line in logs if "mine:Env raised ZeroDivisionError" in str(line)]
    assert logged["exc_info"] is failures[1]
    assert actor.worker.counts["failed_episodes"] == 4
    assert actor.worker.sampled == (2, 4, 2, 2.0)
    assert await actor.leases_left() == 0


@pytest.mark.parametrize("raised", [SystemExit("mine"), asyncio.CancelledError("mine")])
async def test_an_environment_that_exits_or_cancels_itself_ends_no_actor(bus, engine, raised):
    actor = Actor(bus, engine, PluginEnvironment("mine:Env", FailingFor({1: raised})))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    assert [t.end for t in batch.trajectories] == ["completed", "environment_error", "completed"]
    assert await actor.leases_left() == 0


async def test_siblings_are_told_to_stop_once_their_group_cannot_be_used(bus, engine):
    class Endless(FailingFor):
        told = 0

        async def run(self, task, policy):
            if task.task_id.endswith(".3"):
                try:
                    await asyncio.Event().wait()
                finally:
                    self.told += 1
            return await super().run(task, policy)

    environment = Endless({0: ValueError("first"), 1: ValueError("second"), 2: ValueError("third")})
    actor = Actor(bus, engine, environment)
    [rejection] = await actor.roll_out(make_lease(0, samples=4, policy_version=4), result=REJECTED)
    assert (rejection.reason, rejection.detail) == ("rollout_failed", "ValueError: first")
    assert environment.told == 1
    assert await actor.leases_left() == 0


class Unstorable:
    """An environment that returns, for some samples, what a shard refuses."""

    trajectories_per_episode = 1

    def __init__(self, changes):
        self._changes = changes
        self._inner = SingleTurn.from_config(SingleTurnConfig(reward="exact"))

    async def run(self, task, policy):
        episode = await self._inner.run(task, policy)
        [part] = episode.trajectories
        changed = replace(part, **self._changes.get(int(task.task_id.rpartition(".")[2]), {}))
        return replace(episode, trajectories=(changed,))


async def test_what_a_shard_would_refuse_fails_its_sample_before_it_is_sent(bus, engine):
    changes = {0: {"reward": 1e39}, 2: {"metadata": {"tools": {1, 2}}}, 3: {"turns": ()}}
    actor = Actor(bus, engine, Unstorable(changes))
    [batch] = await actor.roll_out(make_lease(0, samples=5, policy_version=4), result=GROUPS)
    ends = [t.end for t in batch.trajectories]
    assert ends == ["environment_error", "completed", "environment_error", "environment_error", "completed"]
    assert "the reward is 1e+39, beyond what float32 holds" in batch.trajectories[0].metadata["failure"]
    assert await actor.leases_left() == 0


async def test_a_sample_with_logprobs_that_a_shard_would_refuse_fails_before_it_is_sent(bus, engine):
    class OneAboveZero(Unstorable):
        async def run(self, task, policy):
            episode = await super().run(task, policy)
            [part] = episode.trajectories
            above = np.asarray(part.behaviour_logprobs, np.float32) + task.task_id.endswith(".1")
            return replace(episode, trajectories=(replace(part, behaviour_logprobs=above),))

    actor = Actor(bus, engine, OneAboveZero({}))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    assert [t.end for t in batch.trajectories] == ["completed", "environment_error", "completed"]
    assert "but no engine can have drawn a token" in batch.trajectories[1].metadata["failure"]


async def test_a_group_of_empty_generations_is_rejected_with_the_reason(bus):
    engine = ScriptedEngine(lambda tokens: [], policy_version=4)
    await engine.start()
    actor = Actor(bus, engine)
    [rejection] = await actor.roll_out(make_lease(0, samples=2, policy_version=4), result=REJECTED)
    assert rejection.reason == "nothing_to_train"
    await engine.close()


async def test_a_group_of_which_one_episode_is_left_is_rejected(bus, engine):
    actor = Actor(bus, engine, FailingFor({0: ValueError("first"), 2: ValueError("last")}))
    [rejection] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=REJECTED)
    assert (rejection.reason, rejection.detail) == ("rollout_failed", "ValueError: first")


async def test_nothing_is_sampled_by_weights_older_than_the_lease(bus, engine):
    """The staleness bound counts from the lease's version, so older weights must not touch it."""
    actor = Actor(bus, engine)
    rolling = asyncio.create_task(actor.roll_out(make_lease(0, samples=1, policy_version=5), result=GROUPS))
    stream = bus.topology.stream("TASKS")
    async with asyncio.timeout(TIMEOUT_S):
        while (await bus.js.consumer_info(stream, "rollout")).num_ack_pending == 0:  # noqa: ASYNC110 - a server's state
            await asyncio.sleep(0.01)
    assert not engine.requests
    await engine.load_weights({}, 5)
    async with actor.follower._swapped:
        actor.follower._swapped.notify_all()
    [batch] = await rolling
    assert batch.trajectories[0].oldest_version == 5


async def test_a_cancelled_worker_aborts_its_generations_at_the_engine(bus, engine):
    actor, stop = Actor(bus, engine), asyncio.Event()
    engine.hold()
    subject = bus.subject("tasks", "rollout")
    await Publisher(bus).publish(
        subject, encode(make_lease(0, samples=3, policy_version=4)), message_id="one"
    )
    working = asyncio.create_task(actor.worker.run(stop, groups_at_once=1))
    async with asyncio.timeout(TIMEOUT_S):
        while engine.running < 3:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait([working])
    assert working.cancelled()
    assert engine.running == 0
    assert await actor.leases_left() == 1


async def test_without_engines_the_worker_ends_and_its_lease_is_left_for_others(bus):
    lost = ScriptedEngine(answer_with("0"), policy_version=4)
    lost._failure = EngineLostError("all engines failed")
    actor = Actor(bus, lost)
    subject = bus.subject("tasks", "rollout")
    await Publisher(bus).publish(
        subject, encode(make_lease(0, samples=2, policy_version=4)), message_id="one"
    )
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ExceptionGroup) as found:
            await actor.worker.run(asyncio.Event(), groups_at_once=1)
    assert found.value.subgroup(EngineLostError)
    assert actor.worker.counts["rejected"] == 0
    assert await actor.leases_left() == 1
