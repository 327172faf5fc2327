"""Streams and consumers of a run."""

import asyncio

import pytest

from bus.config import BusConfig
from bus.connection import Bus
from bus.errors import BusError
from bus.server import NatsServer
from bus.topology import by_shard, ensure, shard_of

STREAMS = {"TASKS", "TRAJECTORIES", "WEIGHTS", "EVENTS", "DEAD"}


@pytest.mark.nats
async def test_ensure_creates_what_is_missing_and_says_which_streams_were_new(bus: Bus):
    assert await ensure(bus.js, bus.topology, shards=2) == set()
    await bus.js.delete_stream(bus.topology.stream("TASKS"))
    assert await ensure(bus.js, bus.topology, shards=2) == {"TASKS"}
    assert await bus.js.consumer_info(bus.topology.stream("TASKS"), "evaluation")


@pytest.mark.nats
async def test_ensure_keeps_what_streams_and_consumers_hold(bus: Bus):
    await bus.js.publish(bus.subject("trajectories", 1), b"kept")
    await ensure(bus.js, bus.topology, shards=3)  # a shard more
    found = await bus.js.consumer_info(bus.topology.stream("TRAJECTORIES"), "shard-1")
    assert found.num_pending == 1
    assert await bus.js.consumer_info(bus.topology.stream("TRAJECTORIES"), "shard-2")


@pytest.mark.nats
async def test_runs_on_one_server_do_not_meet(server: NatsServer, bus: Bus):
    async with Bus.connect(BusConfig(url=server.url), "other", name="t") as other:
        assert await ensure(other.js, other.topology, shards=1) == STREAMS
        await other.js.publish(other.subject("tasks", "rollout"), b"x")
    assert (await bus.js.stream_info(bus.topology.stream("TASKS"))).state.messages == 0


@pytest.mark.nats
async def test_server_without_jetstream_is_refused_by_name_of_the_run(tmp_path):
    class Bare(NatsServer):
        def _config(self) -> str:
            return super()._config().split("jetstream {")[0]

    async with (
        Bare(tmp_path) as server,
        Bus.connect(BusConfig(url=server.url), "plain", name="t") as bus,
    ):
        with pytest.raises(BusError, match="the bus refuses the streams of run 'plain'"):
            await ensure(bus.js, bus.topology, shards=1)
        with pytest.raises(BusError, match="cannot create the keys of run 'plain'"):
            await bus.create_keys()


@pytest.mark.nats
async def test_a_thousand_actors_may_wait_on_one_queue(bus: Bus):
    stream, inbox = bus.topology.stream("TASKS"), bus.client.new_inbox()
    await bus.client.subscribe(f"{inbox}.*")
    for n in range(1000):
        request = b'{"batch": 1, "expires": 30000000000}'
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.rollout"
        await bus.client.publish(subject, request, reply=f"{inbox}.{n}")
    async with asyncio.timeout(5):
        while (await bus.js.consumer_info(stream, "rollout")).num_waiting < 1000:
            pass


def test_every_lease_has_one_shard():
    assert [shard_of(lease, 3) for lease in range(6)] == [0, 1, 2, 0, 1, 2]
    assert by_shard([5, 0, 3, 1, 4], 3) == {2: [5], 0: [0, 3], 1: [1, 4]}
