"""Streams and consumers that a bus loses are made again, and who reads them goes on."""

import asyncio

import pytest

from bus.connection import Bus
from bus.streams import lost_data
from bus.streams.consume import Inbox
from bus.streams.lost_data import keep_streams
from bus.streams.publish import Publisher

pytestmark = pytest.mark.nats


@pytest.mark.parametrize("lost", ["stream", "consumer"])
async def test_reader_goes_on_when_what_it_reads_is_made_again(
    lost: str, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lost_data, "LOOK_AT_STREAMS_S", 0.2)
    name, stop = bus.topology.stream("TASKS"), asyncio.Event()
    taking = asyncio.create_task(Inbox(bus, "TASKS", "rollout").take(1, timeout_s=20))
    while not (await bus.js.consumer_info(name, "rollout")).num_waiting:
        pass
    if lost == "stream":
        await bus.js.delete_stream(name)
    else:
        await bus.js.delete_consumer(name, "rollout")
    keeping = asyncio.create_task(keep_streams(bus, 2, stop))
    await Publisher(bus).publish(bus.subject("tasks", "rollout", 1), b"lease", message_id="1")
    [found] = await taking
    assert found.data == b"lease"
    stop.set()
    await keeping


async def test_nothing_is_made_where_nothing_is_gone(bus: Bus):
    assert await lost_data._gone(bus, 2) == []
    await bus.js.delete_stream(bus.topology.stream("DEAD"))
    await bus.js.delete_consumer(bus.topology.stream("OUTCOMES"), "dispatcher")
    assert await lost_data._gone(bus, 2) == ["consumers of test-OUTCOMES", "test-DEAD"]
