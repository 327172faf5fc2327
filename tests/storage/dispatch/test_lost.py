"""What may be said of leases that are not on the bus, on a real one whose streams lose messages."""

import pytest

from bus.streams.consume import Inbox
from storage.dispatch.leases import LostLeases
from tests.storage.serving import SHARDS, has, messages, send_groups, send_rejections

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def publish(bus, *lease_ids: int) -> None:
    for lease_id in lease_ids:
        await bus.js.publish(bus.subject("tasks", "rollout", lease_id), b"")


async def lose(bus, lease_id: int) -> None:
    subject = bus.subject("tasks", "rollout", lease_id)
    await bus.js.purge_stream(bus.topology.stream("TASKS"), subject=subject)


async def test_lease_is_missed_while_others_are_on_the_bus(bus):
    lost = LostLeases(bus, SHARDS)
    await publish(bus, 0, 1, 2)
    await bus.js.publish(bus.subject("tasks", "evaluation"), b"")
    assert await lost.look([0, 1, 2]) == []
    await lose(bus, 1)
    assert await lost.look([0, 1, 2]) == [1]
    await lose(bus, 2)
    assert await lost.look([0, 1, 2]) == [1, 2]
    await publish(bus, 1, 2)
    assert await lost.look([0, 1, 2]) == []


async def test_lease_may_be_in_trajectories_that_wait_but_not_in_those_that_came_later(bus):
    lost = LostLeases(bus, SHARDS)
    await publish(bus, 0, 1)
    await send_groups(bus, [5])
    await lose(bus, 1)
    assert await lost.look([0, 1]) == []
    await send_groups(bus, [7])
    [first] = await Inbox(bus, "TRAJECTORIES-1", "shard-1").take(1, 20.0)
    assert await lost.look([0, 1]) == []
    await first.ack()
    await has(bus, "TRAJECTORIES-1", 1)
    assert await lost.look([0, 1]) == [1]


async def test_lease_may_be_in_a_rejection_that_waits_but_not_in_one_that_came_later(bus):
    lost = LostLeases(bus, SHARDS)
    await publish(bus, 0, 1)
    await send_rejections(bus, [1])
    await lose(bus, 1)
    assert await lost.look([0, 1]) == []
    [first] = await Inbox(bus, "OUTCOMES", "dispatcher").take(1, 20.0)
    assert await lost.look([0, 1]) == []  # read, and not yet in the ledger
    await send_rejections(bus, [2])
    await first.ack_sync()
    assert await lost.look([0, 1]) == [1]


async def test_lease_that_was_settled_meanwhile_is_not_missed(bus):
    lost = LostLeases(bus, SHARDS)
    await publish(bus, 0, 1)
    await send_groups(bus, [1])
    await lose(bus, 1)
    assert await lost.look([0, 1]) == []
    await bus.js.purge_stream(bus.topology.stream("TRAJECTORIES-1"))
    assert await lost.look([0]) == []
    assert await messages(bus, "TASKS") == 1
