"""Handlers that say what is to become of a message: set aside, or handed to another."""

import asyncio

import pytest

from bus.codec import decode, encode
from bus.connection import Bus
from bus.errors import HandBackError, SchemaError
from bus.messages import DeadLetter, Lease
from bus.streams import consume as consume_module
from bus.streams.consume import Inbox, consume, consume_received
from bus.streams.received import Received
from tests.factories import make_lease

pytestmark = pytest.mark.nats


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_module, "POLL_S", 0.2)


async def test_message_that_its_handler_refuses_is_set_aside_and_the_next_one_handled(bus: Bus):
    stop = asyncio.Event()

    async def handle(lease: Lease) -> None:
        if lease.lease_id == 0:
            raise SchemaError("lease 0 kills")
        stop.set()

    for n in range(2):
        await bus.js.publish(bus.subject("tasks", "rollout"), encode(make_lease(n)))
    async with asyncio.timeout(60):
        await consume(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=stop, concurrency=1)
    letter = decode((await bus.js.get_msg(bus.topology.stream("DEAD"), 1)).data or b"", DeadLetter)
    assert letter.reason == "lease 0 kills"
    assert decode(letter.data, Lease).lease_id == 0
    assert (await bus.js.consumer_info(bus.topology.stream("TASKS"), "rollout")).num_pending == 0


async def test_message_that_is_handed_back_comes_again_at_once_and_says_how_often_it_did(bus: Bus):
    stop, deliveries = asyncio.Event(), []

    async def handle(received: Received[Lease]) -> None:
        deliveries.append(received.deliveries)
        if len(deliveries) < 3:
            raise HandBackError("not now")
        stop.set()

    await bus.js.publish(bus.subject("tasks", "rollout"), encode(make_lease(0)))
    async with asyncio.timeout(25):  # the ack wait is 30 s
        await consume_received(Inbox(bus, "TASKS", "rollout"), bus, Lease, handle, stop=stop, concurrency=1)
    assert deliveries == [1, 2, 3]
