"""Late rewards on a real bus: given whenever, joined by the shards, heard by the dispatcher."""

import asyncio
import json
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest

from bus.codec import encode
from bus.connection import Bus
from bus.errors import ConfigError, SchemaError
from bus.messages import RewardGiven, RunRecord, trajectory_name
from bus.server.nats_server import NatsServer
from bus.trajectory import Trajectory
from storage.client.rewards import RewardSender, Tally, give_lines, give_reward
from storage.settings.admission import AdmissionConfig, PrioritySampler
from storage.store.replay import ReplayStore
from tests.factories import make_trajectory
from tests.storage.serving import (
    SHARDS,
    dead_letters,
    has,
    leases,
    make_shard,
    messages,
    running,
    send,
    send_groups,
    serving,
    until,
)

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


@pytest.fixture
def sender(bus: Bus) -> RewardSender:
    return RewardSender(bus, SHARDS, source="judge")


def late(lease_id: int) -> list[Trajectory]:
    """A group of two without its rewards."""
    return [replace(make_trajectory(lease_id, sample, reward=0.0), reward_due=True) for sample in range(2)]


async def give(sender: RewardSender, lease_id: int, *values: float) -> None:
    for sample, value in enumerate(values):
        await sender.give(trajectory_name(lease_id, sample), value)


def rewards(store: ReplayStore, lease_id: int) -> list[float]:
    return [t.reward for t in store.read([lease_id])]


@asynccontextmanager
async def shard(bus: Bus, directory, *, issued: int = 1000):
    """Shard 0 at work on the store in `directory`."""
    with closing(ReplayStore.open(directory)) as store:
        async with running(make_shard(bus, store, 0, issued=issued).run):
            yield store


# --- joined by the shard ---


async def test_rewards_before_after_twice_and_different_are_joined_once(bus, sender, tmp_path):
    async with shard(bus, tmp_path / "replay") as store:
        await give(sender, 2, 0.25, 0.75)
        await until(lambda: store.rewards["taken"] == 2)
        await send(bus, *late(2))
        await until(lambda: store.completed == [2])
        await send(bus, *late(4))
        await until(lambda: store.trajectories == 4)
        await give(sender, 4, 1.0, 0.0)
        await until(lambda: store.completed == [2, 4])
        await give(sender, 4, 1.0, 0.5)  # the first is known to the bus, the second is another
        await until(lambda: store.rewards["differing"] == 1)
        await RewardSender(bus, SHARDS, source="other").give("g00000004.0", 1.0)
        assert [rewards(store, n) for n in (2, 4)] == [[0.25, 0.75], [1.0, 0.0]]
        assert store.rewards["taken"] == 4
    assert await messages(bus, "DEAD") == 0


async def test_rewards_are_joined_across_restarts_of_shard_server_and_sender(
    bus, server: NatsServer, connect, tmp_path
):
    await send(bus, *late(0), *late(2))
    async with connect("judge") as judge:
        await give(RewardSender(judge, SHARDS), 0, 0.25)
    await server.kill()
    await server.start()
    async with shard(bus, tmp_path / "replay") as store:
        await until(lambda: (store.trajectories, store.rewards["taken"]) == (4, 1))
    async with connect("judge again") as judge:
        await give(RewardSender(judge, SHARDS), 0, 0.25, 0.75)
        await give(RewardSender(judge, SHARDS), 2, 0.5)
    async with shard(bus, tmp_path / "replay") as store:
        await until(lambda: store.completed == [0])
    await server.kill()
    await server.start()
    async with connect("judge at last") as judge:
        await give(RewardSender(judge, SHARDS), 2, 0.5, 1.0)
    async with shard(bus, tmp_path / "replay") as store:
        await until(lambda: store.completed == [0, 2])
        assert [rewards(store, n) for n in (0, 2)] == [[0.25, 0.75], [0.5, 1.0]]


async def test_crash_between_keeping_a_reward_and_its_ack_joins_it_once(bus, sender, tmp_path):
    class KilledAfterGive(ReplayStore):
        def give(self, rewards):
            super().give(rewards)
            raise RuntimeError("killed")

    await give(sender, 0, 0.25)
    with (
        closing(KilledAfterGive.open(tmp_path / "replay")) as store,
        pytest.raises(RuntimeError, match="killed"),
    ):
        await make_shard(bus, store, 0).run(asyncio.Event())
    await bus.js.delete_consumer(bus.topology.stream("OUTCOMES"), "rewards-0")  # redelivers it at once
    [config] = [c for _, c in bus.topology.consumers(SHARDS) if c.durable_name == "rewards-0"]
    await bus.js.add_consumer(bus.topology.stream("OUTCOMES"), config)
    async with shard(bus, tmp_path / "replay") as store:
        await until(lambda: store.rewards["again"] == 1)


async def test_rewards_that_cannot_be_are_set_aside_and_the_others_taken(bus, sender, tmp_path):
    async with shard(bus, tmp_path / "replay", issued=6) as store:
        await send_groups(bus, [2])
        await send(bus, *late(4))
        await until(lambda: store.trajectories == 4)
        subject = bus.subject("outcomes", "rewards", 0)
        await bus.js.publish(subject, b"garbage")
        for name in ("g00000001.0", "g00000006.0", "g00000002.1", "g00000004.2"):
            await bus.js.publish(subject, encode(RewardGiven(trajectory_id=name, reward=1.0)))
        await bus.js.publish(
            subject, encode(RewardGiven(trajectory_id="g00000004.0", reward=float("nan"), source="x"))
        )
        await give(sender, 4, 0.25, 0.75)
        await until(lambda: store.completed == [2, 4])
        await has(bus, "DEAD", 6)
    letters = await dead_letters(bus)
    assert sorted(letter.kind for letter in letters) == ["reward"] * 5 + ["unreadable"]
    reasons = " ".join(letter.reason for letter in letters)
    for reason in ("belongs to shard 1, not 0", "never issued", "stored with its reward", "has 2 samples"):
        assert reason in reasons
    assert "reward is nan" in reasons


# --- heard by the dispatcher ---


async def test_group_is_given_to_a_step_with_its_last_reward(bus, learner, sender, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send(bus, *late(0))
        await send_groups(bus, [1])
        asking = asyncio.create_task(learner.batch(1))
        await until(lambda: len(storage.ledger.stored) == 1 and storage.stores[0].trajectories == 2)
        await give(sender, 0, 0.25, 0.75)
        assert await asking == [0, 1]


async def test_spread_of_a_group_is_that_of_its_late_rewards(bus, learner, sender, tmp_path):
    admission = AdmissionConfig(
        groups_per_step=2, samples_per_prompt=2, max_staleness=1, sampler=PrioritySampler()
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send(bus, *late(0))
        await give(sender, 0, 0.0, 3.0)
        await until(lambda: 0 in storage.ledger.stored)
        assert storage.ledger.stored[0].spread == 1.5


async def test_group_that_only_waits_for_its_rewards_is_not_rolled_out_again(bus, learner, tmp_path):
    async with serving(bus, tmp_path) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 4)
        await send(bus, *late(0))
        await send(bus, *late(1))
        await until(lambda: all(store.trajectories == 2 for store in storage.stores))
        await bus.js.purge_stream(bus.topology.stream("TASKS"))  # actors took them all; two were lost
        await has(bus, "TASKS", 2)
        assert {lease.lease_id for lease in await leases(bus)} == {2, 3}


async def test_group_whose_rewards_never_come_is_dropped_and_counted(bus, learner, sender, tmp_path):
    admission = AdmissionConfig(
        groups_per_step=2, samples_per_prompt=2, max_staleness=0, incomplete="drop", patience_s=3.0
    )
    async with serving(bus, tmp_path, admission) as storage:
        await learner.publish(0)
        await has(bus, "TASKS", 2)
        await send(bus, *late(0))
        await give(sender, 0, 0.25)
        await send_groups(bus, [1])
        await until(lambda: 1 in storage.ledger.stored and storage.stores[0].trajectories == 2)
        asking = asyncio.create_task(learner.batch(1))
        await has(bus, "TASKS", 3)
        await give(sender, 0, 0.25, 0.75)  # too late
        await until(lambda: storage.stores[0].completed == [0])
        await send_groups(bus, [2])
        assert await asking == [1, 2]
        assert storage.ledger.reasons == {"incomplete": 1}
        assert storage.ledger.account().balanced()


# --- giving ---


async def test_reward_is_given_by_name_to_the_shard_that_has_it(bus, tmp_path):
    await bus.put("run", RunRecord(name="test", config_json=json.dumps({"replay": {"shards": SHARDS}})))
    await give_reward(bus, "g00000004.1", 0.75, source="judge")
    async with shard(bus, tmp_path / "replay") as store:
        await until(lambda: store.rewards["taken"] == 1)
    with pytest.raises(SchemaError, match="names no trajectory"):
        await give_reward(bus, "4.1", 0.75)
    with pytest.raises(SchemaError, match="reward is inf"):
        await give_reward(bus, "g00000004.1", float("inf"))


async def test_reward_for_a_run_that_is_not_there_is_refused(bus):
    with pytest.raises(ConfigError, match="there is no run 'test' on this bus"):
        await give_reward(bus, "g00000004.1", 0.75)


async def chunks(lines):
    """Give the bytes as they come from a file, a few at a time."""
    for n in range(0, len(lines), 4):
        yield lines[n : n + 4]


async def test_bad_lines_are_named_and_stop_none_of_the_others(bus, sender):
    lines = [
        '{"trajectory_id": "g00000000.0", "reward": 0.5}',
        "",
        "not json",
        '{"trajectory_id": "g00000000.1"}',
        "[1, 2]",
        '{"trajectory_id": "g00000000.1", "reward": "0.5"}',
        '{"trajectory_id": "g00000000.1", "reward": true}',
        '{"trajectory_id": "first", "reward": 0.5}',
        '{"trajectory_id": "g00000000.1", "reward": NaN}',
        b'{"trajectory_id": "g00000001.1", "reward": 1, "by": "me"}\n',
    ]
    tally = Tally()
    await give_lines(sender, chunks(lines), tally)
    assert tally.taken == 2
    assert [refusal.split(":")[0] for refusal in tally.refused] == [f"line {n}" for n in range(3, 10)]
    for refusal, reason in zip(
        tally.refused,
        [
            "not JSON",
            "no trajectory_id",
            "no trajectory_id",
            "no text and a number",
            "no text and a number",
            "names no trajectory",
            "reward is nan",
        ],
        strict=True,
    ):
        assert reason in refusal
    assert await messages(bus, "OUTCOMES") == 2
    again = Tally()
    await give_lines(sender, chunks(lines), again)
    assert (again.taken, await messages(bus, "OUTCOMES")) == (2, 2)
