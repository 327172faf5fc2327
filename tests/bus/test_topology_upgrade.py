"""The streams of a run that an older build made."""

import asyncio

import pytest

from bus.errors import BusError
from bus.streams.consume import Inbox
from bus.topology import differences, ensure
from tests.conftest import Connect

pytestmark = pytest.mark.nats


async def info(bus, name):
    return (await bus.js.stream_info(bus.topology.stream(name))).config


async def test_streams_and_consumers_of_an_older_build_get_the_settings_of_this_one(connect: Connect):
    async with connect("upgraded") as bus:
        tasks, *_ = bus.topology.streams(2)
        old = tasks.evolve(
            max_bytes=1 << 20, duplicate_window=1.0, subjects=[bus.subject("tasks", "rollout")]
        )
        await bus.js.add_stream(old)
        await bus.js.publish(bus.subject("tasks", "rollout"), b"kept")
        stream, consumer = bus.topology.consumers(1)[0]
        await bus.js.add_consumer(
            bus.topology.stream(stream),
            consumer.evolve(
                ack_wait=5.0,
                max_ack_pending=7,
                filter_subjects=None,
                filter_subject=bus.subject("tasks", "rollout"),
            ),
        )
        assert "TASKS" not in await ensure(bus.js, bus.topology, shards=1)
        found = await info(bus, "TASKS")
        assert differences(found, tasks) == {}
        assert (found.max_bytes, found.duplicate_window) == (tasks.max_bytes, 120.0)
        assert (await bus.js.stream_info(tasks.name)).state.messages == 1
        known = await bus.js.consumer_info(tasks.name, "rollout")
        assert (known.config.ack_wait, known.config.max_ack_pending) == (30.0, 65536)
        assert known.num_pending == 1
        await bus.js.publish(bus.subject("tasks", "rollout", 7), b"as of this build")
        inbox, taken = Inbox(bus, "TASKS", "rollout"), []
        async with asyncio.timeout(60):
            while len(taken) < 2:  # one may arrive before the other
                taken += await inbox.take(2)


async def test_streams_that_are_as_they_should_be_are_left_alone(bus, monkeypatch):
    async def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(bus.js, "update_stream", refuse)
    assert await ensure(bus.js, bus.topology, shards=2) == set()


async def test_what_cannot_be_changed_in_a_stream_is_refused_with_the_servers_reason(connect: Connect):
    async with connect("upgraded") as bus:
        tasks, *_ = bus.topology.streams(2)
        await bus.js.add_stream(tasks.evolve(retention="limits"))
        with pytest.raises(BusError, match=r"refuses the streams of run 'test': .* change retention policy"):
            await ensure(bus.js, bus.topology, shards=1)


async def test_replicas_that_an_operator_added_stay(bus):
    tasks, *_ = bus.topology.streams(2)
    assert differences(tasks.evolve(num_replicas=3), tasks) == {}
    assert differences(tasks, tasks.evolve(num_replicas=3)) == {"num_replicas": 3}
