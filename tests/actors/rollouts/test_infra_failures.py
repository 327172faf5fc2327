"""What something around the policy broke is counted, repeated as the settings say, and biases nothing."""

import asyncio
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from math import sqrt

import numpy as np
import pytest

from actors.environments.plugin import PluginEnvironment
from actors.environments.single_turn import SingleTurn
from actors.episodes.episode import Episode, FailedEpisode
from actors.metrics.episode_metrics import EpisodeEnds
from actors.policy.strand import Call
from actors.rewards.base import LATER, BudgetSpentError, RewardError, Scored
from actors.rewards.group_filters import load_filter
from actors.rewards.scoring.scorers import GroupScorer, Scorer
from actors.rollouts.group import Group
from actors.settings.groups import GroupLimitsConfig, RetriesConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.errors import ConfigError, EngineError
from bus.policy_names import DEFAULT_POLICY
from bus.streams.publish import Publisher
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.config.advantage import GRPOAdvantage
from learner.data.batches import make_step_batch, recorded_samples
from tests.actors.rollouts.whole_actor import GROUPS, REJECTED, TIMEOUT_S, Actor, answer_with, leaf
from tests.factories import make_lease

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
SEED = 18
LEASES, SAMPLES = 60, 8


@pytest.fixture
async def engine():
    engine = ScriptedEngine(answer_with("0"), policy_version=4)
    await engine.start()
    yield engine
    await engine.close()


def drawn(what: str, name: str) -> float:
    """A number in [0, 1) that is always the same for the name."""
    digest = blake2b(f"{SEED}/{what}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def solved(task_id: str) -> float:
    """The reward of a sample: 1 as often as its prompt is easy."""
    return float(drawn("solved", task_id) < drawn("easy", task_id.partition(".")[0]))


class Breaking:
    """Fails a tenth of the rollouts, in every way there is; how it does so does not depend on the answer."""

    trajectories_per_episode = 1
    WAYS = (ZeroDivisionError("mine"), RewardError("the judge"), EngineError("it fell"), TimeoutError(), None)

    def __init__(self, share: float) -> None:
        self._share = share
        self._tries: Counter[str] = Counter()
        self._inner = SingleTurn(Scorer("mine", timeout_s=60, reward=self._reward))

    async def _reward(self, answer):
        return solved(answer.task_id)

    async def run(self, task, policy):
        self._tries[task.task_id] += 1
        name = f"{task.task_id}/{self._tries[task.task_id]}"
        if drawn("breaks", name) >= self._share:
            return await self._inner.run(task, policy)
        error = self.WAYS[int(drawn("way", name) * len(self.WAYS))]
        if error is not None:
            raise error
        broken = policy.fresh(task.task_id)
        await broken.chat(task.messages)
        return Episode(broken.trajectories(0.0, end="tool_error"))


async def trained(bus, engine, share, retries):
    """Roll out all groups, sending nothing: the groups, the worker, and the advantages of what is trained."""
    worker = Actor(bus, engine, PluginEnvironment("mine:Env", Breaking(share)), retries=retries).worker
    groups = []
    for lease_id in range(LEASES):
        group = Group(make_lease(lease_id, samples=SAMPLES, policy_version=4), 1, "tester", 4)
        await worker._gather(group)
        worker._count(group)
        [(_, batch, _)] = group.unsent()
        groups.append(batch.trajectories)
    advantages = estimate_advantages(GRPOAdvantage(), groups)
    samples = make_step_batch(groups, recorded_samples(groups), advantages, policy_version=4).samples
    return groups, worker, np.array([float(one.streams["advantages"]) for one in samples])


def p_of_mean(rewards: list[float], everything: list[float]) -> float:
    """Two-sided p of a mean of rewards, if they were a random part of everything (finite population)."""
    from scipy import stats

    n, total = len(rewards), len(everything)
    spread = np.std(everything, ddof=1) * sqrt((1 - min(n, total - 1) / total) / n)
    return float(2 * stats.norm.sf(abs(np.mean(rewards) - np.mean(everything)) / spread))


ONCE_EACH = RetriesConfig(**dict.fromkeys(RetriesConfig.model_fields, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retries", "expected"), [pytest.param(RetriesConfig(), 0.1, marks=pytest.mark.slow), (ONCE_EACH, 0.01)]
)
async def test_failures_of_a_tenth_of_the_episodes_bias_neither_rewards_nor_advantages(
    bus, engine, monkeypatch, retries, expected
):
    from scipy import stats  # takes a quarter of a second to import, and only this needs it

    monkeypatch.setattr("actors.rollouts.worker.FAILED_LOG_PERIOD_S", 3600.0)
    groups, worker, advantages = await trained(bus, engine, 0.1, retries)
    everything = [t for group in groups for t in group]
    names = [f"{t.group_id}.{t.rollout}" for t in everything]
    assert len(set(names)) == LEASES * SAMPLES
    kept = {name: t.reward for name, t in zip(names, everything, strict=True) if t.is_trained}
    assert kept == {name: solved(name) for name in kept}
    failed = len(everything) - len(kept)
    assert stats.binomtest(failed, len(everything), expected).pvalue > 0.01

    intended = [solved(name) for name in names]
    assert p_of_mean(list(kept.values()), intended) > 0.01
    if expected == 0.1:  # the test sees the bias of failures that are trained as zeros
        assert p_of_mean([kept.get(name, 0.0) for name in names], intended) < 1e-6

    _, _, without = await trained(bus, engine, 0.0, RetriesConfig())
    assert len(advantages) == len(kept)
    assert stats.ks_2samp(advantages, without).pvalue > 0.01
    assert abs(advantages.sum()) < 1e-5  # float32: of each group the sum is 0, whoever of it failed

    ends = worker.ends.status["ends"]
    assert (sum(ends.values()), ends["completed"]) == (len(everything), len(kept))
    kinds = ("reward", "environment", "infra")
    counted = [worker.ends.metrics[f"rollout/{kind}_failed_episodes"] for kind in kinds]
    assert sum(counted) == failed
    if expected == 0.1:
        assert min(counted) > 0


class FailingAtFirst:
    """Each sample fails a number of times, by raising or by an end that is not to be trusted."""

    trajectories_per_episode = 1

    def __init__(self, times, end=None):
        self._times, self._end = times, end
        self.seeds: dict[str, list[int]] = {}
        self._inner = SingleTurn(Scorer("mine", timeout_s=60, reward=lambda answer: 1.0))

    async def run(self, task, policy):
        seeds = self.seeds.setdefault(task.task_id, [])
        episode = await self._inner.run(task, policy)
        seeds.append(
            policy.fresh(task.task_id)._seeded(Call(0, "solver", DEFAULT_POLICY, policy.sampling, True)).seed
        )
        if len(seeds) > self._times:
            return episode
        if self._end is None:
            raise RewardError("the judge is away")
        return replace(episode, trajectories=tuple(replace(t, end=self._end) for t in episode.trajectories))


@pytest.mark.parametrize("end", [None, "tool_error"])
async def test_a_failed_rollout_is_repeated_with_its_seeds_as_often_as_the_settings_say(bus, engine, end):
    name = end or "reward_error"
    environment = FailingAtFirst(2, end)
    actor = Actor(bus, engine, environment, retries=RetriesConfig(**{name: 2, "engine_error": 9}))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    assert [(t.end, t.reward) for t in batch.trajectories] == [("completed", 1.0)] * 3
    assert actor.worker.counts["repeated_episodes"] == 6
    assert actor.worker.ends.status == {"ends": {"completed": 3}, "recent_ends": {"completed": 3}}
    assert [(len(seeds), len(set(seeds))) for seeds in environment.seeds.values()] == [(3, 1)] * 3


async def test_a_rollout_that_fails_more_often_counts_as_failed_once(bus, engine):
    actor = Actor(bus, engine, FailingAtFirst(2), retries=RetriesConfig(reward_error=1))
    [rejection] = await actor.roll_out(make_lease(0, samples=1, policy_version=4), result=REJECTED)
    assert (rejection.reason, rejection.detail) == ("rollout_failed", "RewardError: the judge is away")
    assert actor.worker.ends.status["ends"] == {"reward_error": 1}
    assert actor.worker.ends.metrics == {
        "rollout/episodes": 1, "rollout/infra_failed_episodes": 0,
        "rollout/reward_failed_episodes": 1, "rollout/environment_failed_episodes": 0,
        "rollout/recent_episodes": 1, "rollout/recent_infra_failed_episodes": 0,
        "rollout/infra_failed_fraction": 0.0,
    }  # fmt: skip


def test_the_fraction_is_that_of_recent_episodes(monkeypatch):
    monkeypatch.setattr("actors.metrics.episode_metrics.RECENT", 4)
    ends = EpisodeEnds()
    assert set(ends.metrics.values()) == {0}  # and no fraction
    ends.add(["completed"] * 9)
    ends.add(["timeout", "length"])
    assert ends.metrics["rollout/infra_failed_fraction"] == 0.25
    assert ends.status == {
        "ends": {"completed": 9, "timeout": 1, "length": 1},
        "recent_ends": {"completed": 2, "timeout": 1, "length": 1},
    }


def grouped(reward, own=lambda answer: float(answer.task_id.endswith(".1"))):
    """Single turns, whose rewards a group reward makes from those that the answers have alone."""
    return SingleTurn(
        Scorer("own", timeout_s=5, reward=own), GroupScorer("group", timeout_s=60, reward=reward)
    )


async def test_a_group_reward_gives_the_final_rewards(bus, engine):
    def ranked(answers):
        assert [answer.task_id for answer in answers] == [f"g00000000.{n}" for n in range(3)]
        return [Scored(answer.reward - 0.25 * n, {"rank": float(n)}) for n, answer in enumerate(answers)]

    actor = Actor(bus, engine, grouped(ranked))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    found = [(t.reward, t.reward_components) for t in batch.trajectories]
    assert found == [(0.0, {"rank": 0.0}), (0.75, {"rank": 1.0}), (-0.5, {"rank": 2.0})]


async def test_an_answer_that_makes_a_group_reward_fail_is_trained_on_with_the_lowest(bus, engine):
    def checked(answers):
        if any(one.task_id.endswith(".1") and one.text != one.label for one in answers):
            raise ValueError("such words")
        return [1.0 for _ in answers]

    environment = SingleTurn(
        Scorer("own", timeout_s=60, reward=lambda answer: 0.5),
        GroupScorer("group", timeout_s=60, reward=checked, lowest=-1.0),
    )
    actor, lease = Actor(bus, engine, environment), make_lease(0, samples=3, policy_version=4)
    other = replace(lease, prompt=replace(lease.prompt, label="1"))  # the engine answers 0
    [batch] = await actor.roll_out(other, result=GROUPS)
    assert [t.reward for t in batch.trajectories] == [1.0, -1.0, 1.0]
    assert ["such words" in t.metadata.get("reward_fault", "") for t in batch.trajectories] == [
        False, True, False,
    ]  # fmt: skip


async def test_a_group_reward_sees_only_answers_that_did_not_fail(bus, engine):
    def own(answer):
        return 1 / 0 if answer.task_id.endswith(".1") else 1.0

    actor = Actor(bus, engine, grouped(lambda answers: [2.0] * len(answers), own))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    found = [(t.end, t.reward) for t in batch.trajectories]
    assert found == [("completed", 2.0), ("reward_error", 0.0), ("completed", 2.0)]


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        (grouped(lambda answers: [1.0]), "returned [1.0]: return a list"),
        (grouped(lambda answers: 1 / 0), "raised ZeroDivisionError"),
        (grouped(lambda answers: [1.0] * 2, lambda _: LATER), "a group reward needs it now"),
    ],
)
async def test_a_group_reward_that_fails_rejects_its_group(bus, engine, environment, why):
    actor = Actor(bus, engine, environment)
    [rejection] = await actor.roll_out(make_lease(0, samples=2, policy_version=4), result=REJECTED)
    assert rejection.reason == "rollout_failed"
    assert why in rejection.detail
    assert set(actor.worker.ends.status["ends"]) == {"reward_error"}  # a sibling may be stopped before


class OwnGroups:
    """A user's environment that rewards its groups by itself, or fails to."""

    trajectories_per_episode = 1

    def __init__(self, scored):
        self._scored = scored
        self._inner = SingleTurn(Scorer("mine", timeout_s=60, reward=lambda answer: 1.0))

    async def run(self, task, policy):
        return await self._inner.run(task, policy)

    async def score_group(self, episodes):
        return self._scored(episodes)


async def test_an_environment_of_ones_own_may_score_groups(bus, engine):
    def scored(episodes):
        [first, *_] = episodes
        return {**episodes, first: FailedEpisode("environment_error", "not comparable")}

    actor = Actor(bus, engine, PluginEnvironment("mine:Env", OwnGroups(scored)))
    [batch] = await actor.roll_out(make_lease(0, samples=3, policy_version=4), result=GROUPS)
    assert [t.end for t in batch.trajectories] == ["environment_error", "completed", "completed"]


def cancelled_by_itself(_):
    raise asyncio.CancelledError("of the reward's own")


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("scored", "why"),
    [
        (dict, "{}"),
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (cancelled_by_itself, "CancelledError: of the reward's own"),
    ],
)
async def test_an_environment_that_cannot_score_its_group_loses_it(bus, engine, scored, why):
    environment = OwnGroups(scored if scored is not dict else lambda _: {})
    actor = Actor(bus, engine, PluginEnvironment("mine:Env", environment))
    [rejection] = await actor.roll_out(make_lease(0, samples=2, policy_version=4), result=REJECTED)
    assert rejection.reason == "rollout_failed"
    assert why in rejection.detail
    assert actor.worker.ends.status["ends"] == {"environment_error": 2}


async def test_a_spent_budget_ends_the_run_and_says_so(bus, engine):
    def spent(answer):
        raise BudgetSpentError("reward judge: the budget max_calls=3 of this actor is spent")

    actor = Actor(bus, engine, SingleTurn(Scorer("judge", timeout_s=60, reward=spent)))
    lease = encode(make_lease(0, samples=1, policy_version=4))
    await Publisher(bus).publish(bus.subject("tasks", "rollout"), lease, message_id="0")
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ExceptionGroup) as found:
            await actor.worker.run(asyncio.Event(), groups_at_once=1)
    assert "max_calls=3 of this actor is spent" in leaf(found.value.subgroup(ConfigError))


async def test_a_group_of_answers_that_are_too_long_is_rejected_with_a_reason(bus, engine):
    actor = Actor(bus, engine)  # answers of two tokens
    actor.worker._keep = load_filter("none", GroupLimitsConfig(mean_tokens_max=1.5))
    [rejection] = await actor.roll_out(make_lease(0, samples=2, policy_version=4), result=REJECTED)
    assert rejection.reason == "too_long"


async def test_a_group_of_cut_off_answers_is_rejected_with_a_reason(bus):
    engine = ScriptedEngine(answer_with("0123456789"), policy_version=4)  # of which eight are allowed
    actor = Actor(bus, engine)
    actor.worker._keep = load_filter("none", GroupLimitsConfig(drop_all_truncated=True))
    [rejection] = await actor.roll_out(make_lease(0, samples=2, policy_version=4), result=REJECTED)
    assert rejection.reason == "all_truncated"
