"""Bytes that were garbled on the way, within a frame that is whole, cost a question or a message only."""

import asyncio
from collections.abc import Callable

import pytest
from nats.js.api import ConsumerConfig

from bus import waiting
from bus.codec import Message, decode, encode
from bus.connection import Bus
from bus.errors import BusError, SchemaError
from bus.messages import DeadLetter, Lease, RoleHolder, Status
from bus.requests import Done, LeaseRequest, LeaseState
from bus.streams.blob_store import get_blob, put_blob
from bus.streams.consume import Inbox, consume, consume_batches
from bus.streams.publish import Publisher
from bus.streams.stream_reader import StreamReader
from bus.waiting import GarbledAnswerError, is_away
from tests.conftest import Connect
from tests.factories import make_lease

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
HOLDER = RoleHolder(incarnation="a", host="here", pid=1)
OPEN = LeaseState(state="open", policy_version=3)
Change = Callable[[bytes], bytes]
CHANGES: dict[str, Change] = {
    "no UTF-8": lambda data: b"\xff" + data[1:],
    "no JSON": lambda data: b"x" + data[1:],
    "other JSON": lambda data: b"[]",
    "nothing": lambda data: b"",
}


class Garbling:
    """Changes the payload, headers or reply of the next messages that a connection gets, where they are as
    `where` says."""

    def __init__(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self._client = bus.client
        self._passed = self._client._process_msg
        monkeypatch.setattr(self._client, "_process_msg", self._pass)

    def next(
        self, count: int = 1, *, data: Change | None = None, reply: Change | None = None,
        headers: Change | None = None, where: Callable[[bytes], bool] = lambda data: True,
    ) -> None:  # fmt: skip
        self.left, self._where = count, where
        self._data, self._reply, self._headers = data, reply, headers

    async def _pass(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        is_awaited = sid in self._client._subs  # the rest of an answer that was given up is not
        if self.left and is_awaited and self._where(data):
            self.left -= 1
            data = self._data(data) if self._data else data
            reply = self._reply(reply) if self._reply else reply
            headers = self._headers(headers) if self._headers else headers
        await self._passed(sid, subject, reply, data, headers)


@pytest.fixture
def garbling(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Garbling:
    monkeypatch.setattr(waiting, "RETRY_S", 0.01)
    return Garbling(bus, monkeypatch)


# --- keys and streams ---


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_keys_are_asked_for_again(bus: Bus, garbling: Garbling, change: Change):
    await bus.put("role.a", HOLDER)
    garbling.next(3, data=change)
    assert (await bus.get("role.a", RoleHolder)) == (HOLDER, 1)
    garbling.next(3, data=change)
    await bus.put("role.a", HOLDER)
    garbling.next(3, data=change)
    assert await bus.keys("role") == ["role.a"]
    garbling.next(3, data=change)
    await bus.delete("role.a")
    assert garbling.left == 0
    assert await bus.get("role.a", RoleHolder) is None


async def test_a_swap_that_may_have_happened_is_an_outage(bus: Bus, garbling: Garbling):
    garbling.next(data=CHANGES["no JSON"])
    with pytest.raises(BusError, match="cannot be read") as failure:
        await bus.swap("role.a", HOLDER, 0)
    assert is_away(failure.value)


async def test_a_key_that_is_garbled_where_it_is_stored_is_told_of_soon(bus: Bus, garbling: Garbling):
    await bus._keys.write("role.a", b"\xff")
    with pytest.raises(BusError, match=r"the answer from key 'role\.a' is garbled") as failure:
        await bus.get("role.a", RoleHolder)
    assert is_away(failure.value)  # so that this process is started again later, when somebody wrote it anew


async def test_a_request_that_the_server_cannot_read_is_an_outage(bus: Bus, monkeypatch: pytest.MonkeyPatch):
    sent = bus.client.request
    monkeypatch.setattr(
        bus.client, "request", lambda subject, payload, **options: sent(subject, b"{" + payload, **options)
    )
    with pytest.raises(GarbledAnswerError, match="could not read the request"):
        await bus.js.stream_info(bus.topology.stream("TASKS"), subjects_filter=">")


async def test_a_reader_of_a_stream_reads_again(bus: Bus, garbling: Garbling):
    for text in ("a", "b"):
        await Publisher(bus).publish(bus.subject("events", "metrics"), text.encode(), message_id=text)
    reader = StreamReader(bus, "EVENTS", bus.subject("events", ">"))
    for before, after in (
        (b"Nats-Sequence", b"Nuts-Sequence"),
        (b"Nats-Time-Stamp: 2", b"Nats-Time-Stamp: x"),
    ):
        garbling.next(headers=lambda headers, b=before, a=after: headers.replace(b, a))
        with pytest.raises(BusError, match="without its place") as failure:
            await reader.take(10)
        assert is_away(failure.value)
    assert [message.data for message in await reader.take(10)] == [b"a", b"b"]


async def test_a_piece_of_a_blob_is_fetched_again(bus: Bus, garbling: Garbling):
    ref = await put_blob(bus, Publisher(bus), bytes(1000), "model")
    garbling.next(data=lambda data: b"\1" + data[1:], where=lambda data: len(data) == 1000)
    assert await get_blob(bus, ref) == bytes(1000)
    assert garbling.left == 0


# --- requests, answers and notices ---


async def test_an_answer_of_another_process_is_asked_for_again(
    bus: Bus, garbling: Garbling, connect: Connect
):
    async def answer(request: LeaseRequest) -> list[Message]:
        return [OPEN] * request.lease_id

    request = bus.subject("rpc", "lease")
    async with connect("other") as other:
        await other.serve(request, LeaseRequest, answer)
        await other.client.flush()
        for change in (CHANGES["no UTF-8"], CHANGES["nothing"], lambda data: data[:-1]):
            garbling.next(data=change)
            with pytest.raises(BusError, match=r"the answer from .*lease is garbled") as failure:
                await bus.request(request, LeaseRequest(lease_id=1), LeaseState, timeout_s=20)
            assert is_away(failure.value)
            garbling.next(data=change)
            with pytest.raises(BusError, match=r"the answer from .*lease is garbled") as failure:
                await bus.request_many(request, LeaseRequest(lease_id=2), LeaseState, timeout_s=20)
            assert is_away(failure.value)
        assert await bus.request(request, LeaseRequest(lease_id=1), LeaseState, timeout_s=20) == OPEN


async def test_an_answer_of_another_build_is_told_of_at_once(bus: Bus, garbling: Garbling, connect: Connect):
    async def answer(request: LeaseRequest) -> list[Message]:
        return [OPEN]

    request = bus.subject("rpc", "lease")
    async with connect("other") as other:
        await other.serve(request, LeaseRequest, answer)
        await other.client.flush()
        garbling.next(data=lambda data: data.replace(b"lease_state\1", b"lease_state\7"))
        with pytest.raises(SchemaError, match="schema 7 is newer than this build's 1: upgrade it"):
            await bus.request(request, LeaseRequest(lease_id=1), LeaseState, timeout_s=20)


async def test_a_request_is_refused_so_that_it_comes_again(bus: Bus, garbling: Garbling, connect: Connect):
    handled: list[LeaseRequest] = []

    async def answer(request: LeaseRequest) -> list[Message]:
        handled.append(request)
        return [Done()]

    subject = bus.subject("rpc", "lease")
    await bus.serve(subject, LeaseRequest, answer)
    await bus.client.flush()
    async with connect("asker") as asker:
        garbling.next(data=CHANGES["no UTF-8"])
        with pytest.raises(BusError, match="not MessagePack") as failure:
            await asker.request(subject, LeaseRequest(lease_id=1), Done, timeout_s=20)
        assert is_away(failure.value)
        assert not handled
        await asker.request(subject, LeaseRequest(lease_id=1), Done, timeout_s=20)
    assert handled == [LeaseRequest(lease_id=1)]


async def test_a_notice_is_dropped(bus: Bus, garbling: Garbling):
    heard, came = [], asyncio.Event()

    def hear(status: Status) -> None:
        heard.append(status.source)
        came.set()

    await bus.listen(bus.subject("status", "test"), Status, hear)
    garbling.next(data=CHANGES["no UTF-8"])
    for source in ("a", "b"):
        status = Status(source=source, role="test", doing="", pid=1, peak_rss_bytes=1)
        await bus.notify(bus.subject("status", "test"), status)
    async with asyncio.timeout(60):
        await came.wait()
    assert heard == ["b"]


# --- publishing and consuming ---


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "change",
    [*CHANGES.values(), lambda data: b'{"seq": 0}', lambda data: b'{"error": 7}'],
    ids=[*CHANGES, "no number", "no error"],
)
async def test_what_is_published_is_stored_once(bus: Bus, garbling: Garbling, change: Change):
    publisher = Publisher(bus)
    garbling.next(2, data=change)
    async with asyncio.timeout(60):
        await publisher.publish(bus.subject("tasks", "rollout", 0), encode(make_lease(0)), message_id="one")
    assert (publisher.counts.stored, publisher.counts.duplicates) == (0, 1)
    assert (await bus.js.stream_info(bus.topology.stream("TASKS"))).state.messages == 1


def is_lease(data: bytes) -> bool:
    try:
        return bool(decode(data, Lease))
    except SchemaError:
        return False


@pytest.mark.parametrize("batches", [False, True], ids=["one by one", "in batches"])
async def test_a_message_is_set_aside_and_the_next_one_handled(bus: Bus, garbling: Garbling, batches: bool):
    stop, handled = asyncio.Event(), []

    async def handle(lease: Lease) -> None:
        handled.append(lease.lease_id)
        stop.set()

    async def handle_all(leases: list[Lease]) -> None:
        for lease in leases:
            await handle(lease)

    for n in range(2):
        await bus.js.publish(bus.subject("tasks", "rollout"), encode(make_lease(n)))
    garbling.next(data=lambda data: data[:-3], where=is_lease)
    inbox = Inbox(bus, "TASKS", "rollout")
    async with asyncio.timeout(60):
        if batches:
            await consume_batches(inbox, bus, Lease, handle_all, stop=stop, limit=8)
        else:
            await consume(inbox, bus, Lease, handle, stop=stop, concurrency=1)
    assert handled == [1]
    letter = decode((await bus.js.get_msg(bus.topology.stream("DEAD"), 1)).data or b"", DeadLetter)
    assert "not MessagePack" in letter.reason


@pytest.mark.parametrize(
    "reply",
    [lambda reply: b"x" + reply[1:], lambda reply: reply.replace(b".1.", b".x.", 1), lambda reply: b""],
    ids=["no ack", "no number", "none"],
)
async def test_a_message_that_cannot_be_acked_comes_again(bus: Bus, garbling: Garbling, reply: Change):
    stop, handled = asyncio.Event(), []

    async def handle(lease: Lease) -> None:
        handled.append(lease.lease_id)
        stop.set()

    stream = bus.topology.stream("TASKS")
    await bus.js.add_consumer(stream, ConsumerConfig(durable_name="soon", ack_policy="explicit", ack_wait=0.2,
                                                     filter_subject=bus.subject("tasks", "x")))  # fmt: skip
    await bus.js.publish(bus.subject("tasks", "x"), encode(make_lease(5)))
    garbling.next(reply=reply, where=is_lease)
    async with asyncio.timeout(60):
        await consume(Inbox(bus, "TASKS", "soon"), bus, Lease, handle, stop=stop, concurrency=1)
    assert handled == [5]
    assert garbling.left == 0
