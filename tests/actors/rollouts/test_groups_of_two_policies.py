"""Two trained policies on one worker: what each learner is given, and how far one may run ahead."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from actors.engines.base import Sampling
from actors.episodes.agents import policy_of
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.rewards.group_filters import load_filter
from actors.rollouts import participation
from actors.rollouts.further_leases import FurtherLeases
from actors.rollouts.leases import PolicyLeases
from actors.rollouts.worker import Worker, WorkerParts
from actors.weights.follow import PolicyFollower
from benchmarks.scripted_engine import ScriptedEngine
from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import ConfigError
from bus.topology import ensure
from learner.initial.scratch_model import character_tokenizer
from storage.client.reader import ReplayReader
from storage.settings.admission import AdmissionConfig
from tests.storage.serving import LearnerStandIn, has, manifest, read_batch, running, serving, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
TOKENIZER = character_tokenizer()
OWN, RIVAL = 0, 3
"""Versions of the two policies."""
ADMISSION = AdmissionConfig(groups_per_step=1, samples_per_prompt=2, max_staleness=1)


class Answers:
    """A solver answers, and critics comment where the prompt is one of `criticised`; all are rewarded alike
    in an episode."""

    trajectories_per_episode = 2

    def __init__(self, criticised=lambda task: True):
        self._criticised = criticised

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        await policy.chat(task.messages)
        if self._criticised(task):
            await policy.chat("comment", agent="critic-1")
        return Episode(policy.trajectories(float(task.sample)))


def engine(policy_version):
    ids = TOKENIZER(str(policy_version), add_special_tokens=False)["input_ids"]
    return ScriptedEngine(lambda tokens: [*ids, TOKENIZER.eos_token_id], policy_version=policy_version)


class Actor:
    """A worker of a run whose policy `rival` is trained beside its own."""

    def __init__(self, bus, rival, environment, *, keep="none"):
        self.engines = engine(OWN), engine(RIVAL)
        sampling = Sampling(max_new_tokens=8, stop_token_ids=(TOKENIZER.eos_token_id,))
        others = OtherEngines(further={"rival": self.engines[1]}, agents={"critic": "rival"})
        self.policy = Policy(self.engines[0], TOKENIZER, sampling, others=others)
        self.follower = PolicyFollower(rival, self.engines[1])
        counts = self.policy.turns.counts
        asked = PolicyLeases(rival, self.follower, shards=2, actor="tester", counts=counts)
        self.leases = FurtherLeases("rival", rival, asked, self.follower)
        self.worker = Worker(
            bus, self.policy, environment, WorkerParts(share_after_s=0.0, further={"rival": self.leases}),
            follower=PolicyFollower(bus, self.engines[0]), keep=load_filter(keep), shards=2, name="tester",
        )  # fmt: skip

    @asynccontextmanager
    async def at_work(self):
        async def work(stop):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.worker.run(stop, groups_at_once=4))
                tasks.create_task(self.leases.run(stop, groups_at_once=4))

        for one in self.engines:
            await one.start()
        async with running(work) as task:
            yield task


@pytest.fixture
async def rival(bus_server):
    async with Bus.connect(BusConfig(url=bus_server.url), "test__rival", name="rival") as connected:
        await ensure(connected.js, connected.topology, shards=2)
        await connected.create_keys()
        yield connected


@asynccontextmanager
async def storage_of_both(bus, rival, directory):
    """Both storages, each of whose learners has published its first version."""
    for name in ("own", "rival"):
        (directory / name).mkdir()
    async with (
        serving(bus, directory / "own", ADMISSION) as own,
        serving(rival, directory / "rival", ADMISSION) as other,
    ):
        learners = LearnerStandIn(bus), LearnerStandIn(rival, trains_from=RIVAL)
        await learners[0].publish(OWN)
        await learners[1].publish(RIVAL)
        yield (own, other), learners


def groups_of(storage):
    return sum(store.trajectories for store in storage.stores) // ADMISSION.samples_per_prompt


async def test_each_learner_is_given_the_strands_of_its_own_policy(bus, rival, tmp_path):
    readers = ReplayReader(bus, "a"), ReplayReader(rival, "a")
    async with storage_of_both(bus, rival, tmp_path) as (storages, _):
        async with Actor(bus, rival, Answers()).at_work():
            await until(lambda: all(groups_of(one) == 2 for one in storages))
            [own] = await read_batch(readers[0], 1)
            lease = await readers[1].lease(1, RIVAL, on_wait=lambda reason: None)
            [other] = await readers[1].fetch(lease.groups, on_wait=lambda reason: None)
        await has(bus, "TASKS", 0)
        await has(rival, "TASKS", 0)
    for reader in readers:
        reader.close()
    for group, policy, agent, version in (
        (own, "default", "solver", OWN),
        (other, "rival", "critic-1", RIVAL),
    ):
        assert [(t.policy, t.agent, t.rollout, t.group_size) for t in group] == [
            (policy, agent, 0, 2), (policy, agent, 1, 2),
        ]  # fmt: skip
        assert [t.reward for t in group] == [0.0, 1.0]
        assert all(t.trainable and t.oldest_version == t.newest_version == version for t in group)


async def test_no_policy_runs_ahead_of_the_learner_of_another(bus, rival, tmp_path):
    async with storage_of_both(bus, rival, tmp_path) as (storages, (own, other)):
        actor = Actor(bus, rival, Answers())
        async with actor.at_work():
            await until(lambda: groups_of(storages[0]) == 2)
            for step in (1, 2):
                await own.batch(step)
                await own.publish(OWN)  # its engine keeps the version, which a lease of it may be sampled by
                await own.commit(step)
            await until(lambda: storages[0].ledger.next_id == 2)
            await own.publish(2)
            await until(lambda: storages[0].ledger.next_id == 4)  # its own bound lets two more out
            await actor.engines[0].load_weights({}, 2)
            waiting = actor.leases._waiting
            await until(lambda: len(waiting) == 2)
            assert [groups_of(one) for one in storages] == [2, 2]
            await other.batch(1)
            await other.publish(RIVAL + 1)
            await actor.engines[1].load_weights({}, RIVAL + 1)
            await until(lambda: [groups_of(one) for one in storages] == [3, 3])
            assert len(waiting) == 1


async def test_a_policy_that_takes_no_part_keeps_its_lease_for_the_next_group(bus, rival, tmp_path):
    answers = Answers(lambda task: task.task_id.startswith("g00000001"))
    async with storage_of_both(bus, rival, tmp_path) as (storages, _):
        actor = Actor(bus, rival, answers)
        async with actor.at_work():
            await until(lambda: [groups_of(one) for one in storages] == [2, 1])
        assert not actor.worker.counts["rejected"]
        assert len(storages[1].ledger.rolling_out) == 1


async def test_a_policy_that_never_takes_part_ends_the_run_with_the_remedy(bus, rival, tmp_path, monkeypatch):
    monkeypatch.setattr(participation, "MOST_WITHOUT_PART", 2)
    async with storage_of_both(bus, rival, tmp_path):
        with pytest.raises(ExceptionGroup) as ended:
            async with Actor(bus, rival, Answers(lambda task: False)).at_work() as working:
                await asyncio.wait([working])
    [error] = ended.value.subgroup(ConfigError).exceptions[0].exceptions
    assert "policies.rival.agents" in repr(error)


class Critics(Answers):
    """Nobody but critics says something."""

    async def run(self, task, policy):
        policy = policy.fresh(task.task_id)
        await policy.chat("comment", agent="critic")
        return Episode(policy.trajectories(1.0))


async def test_a_run_whose_own_policy_never_plays_ends_with_the_remedy(bus, rival, tmp_path, monkeypatch):
    monkeypatch.setattr(participation, "MOST_WITHOUT_PART", 2)
    async with storage_of_both(bus, rival, tmp_path):
        with pytest.raises(ExceptionGroup) as ended:
            async with Actor(bus, rival, Critics()).at_work() as working:
                await asyncio.wait([working])
    said = repr(ended.value.subgroup(ConfigError))
    assert "policy 'default' took no part in 2 groups in a row: the run trains it" in said


async def test_a_group_without_the_runs_own_policy_costs_its_lease(bus, rival, tmp_path):
    async with storage_of_both(bus, rival, tmp_path) as (storages, _):
        async with Actor(bus, rival, Critics()).at_work():
            await until(lambda: groups_of(storages[1]) == 2)
            await until(lambda: storages[0].ledger.account().rejected >= 2)
        assert groups_of(storages[0]) == 0


async def test_a_policy_whose_learner_is_done_plays_on_and_is_not_trained(bus, rival, tmp_path):
    reader = ReplayReader(bus, "a")
    async with storage_of_both(bus, rival, tmp_path) as (storages, _):
        actor = Actor(bus, rival, Answers())
        actor.follower._newest.hear(manifest(RIVAL, stage="done"))
        async with actor.at_work():
            [group] = await read_batch(reader, 1)
        assert groups_of(storages[1]) == 0
    reader.close()
    assert [(t.policy, t.trainable, bool(t.loss_mask.any())) for t in group] == [
        ("default", True, True), ("rival", False, False),
    ] * 2  # fmt: skip


async def test_a_group_that_teaches_one_policy_nothing_costs_only_the_lease_of_that_policy(
    bus, rival, tmp_path
):
    class OneSided(Answers):
        async def run(self, task, policy):
            episode = await super().run(task, policy)
            rewards = {"solver": float(task.sample), "critic-1": 1.0}
            return Episode(tuple(replace(part, reward=rewards[part.agent]) for part in episode.trajectories))

    async with storage_of_both(bus, rival, tmp_path) as (storages, _):
        actor = Actor(bus, rival, OneSided(), keep="zero_variance")
        async with actor.at_work():
            await until(lambda: groups_of(storages[0]) == 2)
            await until(lambda: storages[1].ledger.account().rejected >= 2)
        assert groups_of(storages[1]) == 0
        assert storages[0].ledger.account().rejected == 0


async def test_a_call_for_a_policy_that_nobody_trains_says_which_there_are(bus, rival):
    policy = Actor(bus, rival, Answers()).policy.fresh("r")
    with pytest.raises(EpisodeError, match="policy 'rivla', and there are only rival"):
        await policy.chat("x", policy="rivla")


def test_an_agent_is_the_policy_of_its_own_name_or_of_its_role():
    agents = {"rewriter": "second", "solver-2": "third"}
    found = {agent: policy_of(agent, agents) for agent in ("rewriter", "rewriter-12", "solver-2", "solver-1")}
    assert found == {
        "rewriter": "second", "rewriter-12": "second", "solver-2": "third", "solver-1": "default",
    }  # fmt: skip
    assert policy_of("rewriter-x", agents) == "default"
