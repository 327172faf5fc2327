"""A reader of a stream gets each message once, in order, over restarts and over a stream made anew."""

import asyncio

import pytest

from bus.connection import Bus
from bus.errors import BusError
from bus.streams.publish import Publisher
from bus.streams.stream_reader import StreamReader
from bus.topology import ensure

pytestmark = pytest.mark.nats


async def publish(bus: Bus, *texts: str, token: str = "metrics") -> None:
    for text in texts:
        await Publisher(bus).publish(bus.subject("events", token), text.encode(), message_id=text)


async def read(reader: StreamReader, limit: int = 100) -> list[str]:
    return [message.data.decode() for message in await reader.take(limit)]


def events(bus: Bus, subject: str = ">", **options) -> StreamReader:
    return StreamReader(bus, "EVENTS", bus.subject("events", subject), **options)


async def test_messages_come_once_in_order_and_a_successor_goes_on(bus: Bus):
    reader = events(bus)
    assert await read(reader) == []
    await publish(bus, "a", "b", "c")
    assert await read(reader, 2) == ["a", "b"]
    successor = events(bus, after=reader.place)
    assert await read(successor) == ["c"]
    assert await read(successor) == []


async def test_only_the_subject_asked_for_is_read(bus: Bus):
    await publish(bus, "a")
    await publish(bus, "counted", token="counters.actor")
    await publish(bus, "b")
    assert await read(events(bus, "*")) == ["a", "b"]


async def test_what_the_stream_dropped_is_skipped(bus: Bus):
    await publish(bus, "a", "b", "c")
    reader = events(bus)
    await reader.take(1)
    await bus.js.purge_stream(bus.topology.stream("EVENTS"), seq=3)
    assert await read(events(bus, after=reader.place)) == ["c"]


async def test_server_that_was_away_costs_no_message(bus: Bus, server):
    reader = events(bus)
    await publish(bus, "a")
    assert await read(reader) == ["a"]
    await server.kill()
    while bus.client.is_connected:  # noqa: ASYNC110  # the client tells nobody
        await asyncio.sleep(0.01)
    with pytest.raises(BusError, match="away"):
        await reader.take(1)
    await server.start()
    await publish(bus, "b")
    assert await bus.patiently(lambda: read(reader), "reading") == ["b"]


async def test_stream_that_is_made_anew_is_read_from_its_beginning(bus: Bus):
    await publish(bus, "a", "b")
    before = events(bus)
    await before.take(2)
    await bus.js.delete_stream(bus.topology.stream("EVENTS"))
    await ensure(bus.js, bus.topology, shards=2)
    await publish(bus, "c", "d", "e")
    reader = events(bus, after=before.place)
    assert await read(reader) == ["c", "d", "e"]
    assert reader.beginnings == 1
