"""A soak that damages the bus's directory knows what went with it, and what had been lost before."""

import time

import pytest

from bus.codec import encode
from bus.streams.publish import Publisher
from bus.topology import ensure
from bus.trajectory import TrajectoryBatch
from soak.lost_with_bus import LostWithBus
from tests.launch.verify.test_verify import group, no_pause, run  # noqa: F401 - fixtures

pytestmark = pytest.mark.nats


async def test_what_was_on_a_damaged_bus_is_explained_and_what_was_missing_before_stays_lost(
    run, server, connect  # noqa: F811 - the fixture
):  # fmt: skip
    run.directory.name = "test"
    account = LostWithBus(run.directory, server.url)
    account._since_s -= 100  # the soak began earlier than what was sent in it
    run.now_s = account._since_s + 1
    async with connect("tester") as bus:
        await ensure(bus.js, bus.topology, shards=1)
        for lease in (3, 4):  # one of them is taken by a shard that drops it
            data = encode(TrajectoryBatch.of(group(lease)))
            ack = await Publisher(bus).publish(bus.subject("trajectories", 0), data, message_id=f"g{lease}")
            run.sequence = ack.sequence - 1
            run.send(group(lease)[0])
        await bus.js.delete_msg(bus.topology.stream("TRAJECTORIES"), 1)
    found = await account.take_account()
    assert found is not None
    assert found.found["lost"].keys() == {"g00000003.0"}
    assert found.found["in_flight"].keys() == {"g00000004.0"}
    async with connect("tester") as bus:
        await bus.js.purge_stream(bus.topology.stream("TRAJECTORIES"))
    account.bus_damaged()
    found = await account.take_account()
    assert found is not None
    assert found.found["lost_with_bus"].keys() == {"g00000004.0"}
    assert account.lost.keys() == {"g00000003.0"}
    run.now_s = time.monotonic() + 10
    run.send(group(5)[0], number=99)  # after the damage, which does not explain it
    found = await account.take_account()
    assert found is not None
    assert {"g00000005.0"} <= found.found["lost"].keys()
