"""A faulty link does to a connection what it says, and nothing when it is healed."""

import asyncio
import time

import pytest

from soak.link import HOST, faulty_link

TIMEOUT_S = 60
TEXT = b"x" * 4096


@pytest.fixture
async def connect():
    """Connects over a link to a server that sends back what it gets; yields the link, and a way in."""

    async def echo(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    async with server, faulty_link(server.sockets[0].getsockname()[1]) as link, asyncio.timeout(TIMEOUT_S):
        writers = []

        async def connect():
            reader, writer = await asyncio.open_connection(HOST, link.port)
            writers.append(writer)
            return reader, writer

        yield link, connect
        for writer in writers:
            writer.close()


async def there_and_back(reader, writer):
    """What comes back of the text, and after how long."""
    began = time.monotonic()
    writer.write(TEXT)
    return await reader.readexactly(len(TEXT)), time.monotonic() - began


async def test_link_without_faults_carries_what_it_gets(connect):
    _, enter = connect
    assert (await there_and_back(*await enter()))[0] == TEXT


async def test_slow_and_late_links_take_their_time(connect):
    link, enter = connect
    ends = await enter()
    link.bytes_per_s = 4 * len(TEXT)  # a quarter of a second back, half a one there
    assert (await there_and_back(*ends))[1] >= 0.7
    link.heal()
    link.delay_s = 0.2
    assert (await there_and_back(*ends))[1] >= 0.4


async def test_stalled_link_carries_later_what_it_was_given(connect):
    link, enter = connect
    ends = await enter()
    await there_and_back(*ends)
    link.flows.clear()
    waiting = asyncio.create_task(there_and_back(*ends))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    link.heal()
    assert (await waiting)[0] == TEXT


async def test_dropped_connection_ends_and_the_next_one_is_carried(connect):
    link, enter = connect
    reader, writer = await enter()
    await there_and_back(reader, writer)
    assert link.drop() == 1
    assert await reader.read() == b""
    assert (await there_and_back(*await enter()))[0] == TEXT


async def test_garbled_piece_is_as_long_as_it_was_and_the_next_one_is_whole(connect):
    link, enter = connect
    ends = await enter()
    link.garble_pieces = 1
    found, _ = await there_and_back(*ends)
    assert found != TEXT
    assert (await there_and_back(*ends))[0] == TEXT
