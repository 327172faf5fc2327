"""Shards of a run that an older build began, whose trajectories were all on one stream."""

import asyncio
from contextlib import ExitStack, closing

import pytest

from bus.streams.consume import Inbox
from bus.topology import ensure
from storage.store.replay import ReplayStore
from tests.conftest import Connect
from tests.storage.serving import SHARDS, has, make_shard, messages, running, send_groups, until

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]


async def as_an_older_build(bus) -> None:
    """Make TRAJECTORIES with the subjects and the consumers of all shards."""
    first, second = (config for config in bus.topology.streams(SHARDS) if "TRAJECTORIES" in config.name)
    assert (first.name, second.name) == ("test-TRAJECTORIES", "test-TRAJECTORIES-1")
    subjects = [bus.subject("trajectories", ">")]
    await bus.js.add_stream(first.evolve(subjects=subjects, max_bytes=2 * first.max_bytes))
    for shard in range(SHARDS):
        await bus.js.add_consumer(first.name, bus.topology.shard_consumer(shard))


async def test_what_an_older_build_left_for_a_shard_is_stored_once_and_leaves_its_stream(
    connect: Connect, tmp_path
):
    async with connect("upgraded") as bus:
        await as_an_older_build(bus)
        await send_groups(bus, [0, 1, 2, 3])
        [held] = await Inbox(bus, "TRAJECTORIES", "shard-1").take(1, 20.0)  # by a shard that died
        assert await messages(bus, "TRAJECTORIES") == 4
        assert "TRAJECTORIES-1" in await ensure(bus.js, bus.topology, SHARDS)
        await held.nak()
        await send_groups(bus, [3, 5])  # 3 was sent again: its answer had been lost
        assert (await messages(bus, "TRAJECTORIES"), await messages(bus, "TRAJECTORIES-1")) == (4, 2)
        with ExitStack() as stack:
            stores = [
                stack.enter_context(closing(ReplayStore.open(tmp_path / str(n)))) for n in range(SHARDS)
            ]
            async with running(make_shard(bus, stores[1], 1).run):
                await until(lambda: stores[1].completed == [1, 3, 5])
                await has(bus, "TRAJECTORIES", 2)  # the other shard's
            for _ in range(2):  # the second start finds nothing left
                async with (
                    running(make_shard(bus, stores[0], 0).run),
                    running(make_shard(bus, stores[1], 1).run),
                ):
                    await until(lambda: (stores[0].completed, stores[1].completed) == ([0, 2], [1, 3, 5]))
                    await has(bus, "TRAJECTORIES", 0)
                    await has(bus, "TRAJECTORIES-1", 0)
            assert [store.trajectories for store in stores] == [4, 6]


async def test_shard_waits_until_storage_has_given_it_a_stream(connect: Connect, tmp_path):
    """An actor may publish to the older stream until then: what it sent is not to be purged unread."""
    async with connect("upgraded") as bus:
        await as_an_older_build(bus)
        with closing(ReplayStore.open(tmp_path / "replay")) as store:
            shard = make_shard(bus, store, 1)
            async with running(shard.run):
                async with asyncio.timeout(60):
                    await shard.serving.wait()
                await send_groups(bus, [1])
                await ensure(bus.js, bus.topology, SHARDS)
                await until(lambda: store.completed == [1])
                await has(bus, "TRAJECTORIES", 0)
