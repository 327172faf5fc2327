"""The consumer loop: fetch, decode, handle, ack. A message that does not decode goes to DEAD."""

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import NotFoundError

from bus.codec import M, Message
from bus.connection import Bus
from bus.errors import BusError, HandBackError, SchemaError
from bus.security.stream_access import MULTIPLE_ANSWERS_S
from bus.streams.message_parts import Parts
from bus.streams.received import Received, report_progress, understood, while_reporting_progress
from bus.waiting import RETRY_S, cancelled, set_within

log = structlog.get_logger()
AHEAD_BYTES = 64 << 20
"""Bytes of decoded messages that may wait for the batch before them; then no more are taken."""
POLL_S = 1.0
"""Seconds after which an idle loop notices `stop`, or that the connection was made again."""
GONE_S = 20.0
"""Seconds for which a consumer that is gone is waited for: storage makes it again within few."""
PULL_S = 3.0
"""Seconds for which one pull waits on the server; longer in a run of many actors (`Bus.slower`)."""
LONGEST_PULL_S = MULTIPLE_ANSWERS_S / 2
"""Upper bound of that: a secured bus forgets where an answer goes that is twice as late."""


class Inbox:
    """Pulls from a durable consumer; unlike nats-py's `fetch` it never waits for a full batch. One pull is
    outstanding at a time, so no more messages lie here than one `take` asked for."""

    def __init__(self, bus: Bus, stream: str, durable: str, parts: Parts | None = None) -> None:
        self.parts = parts or Parts(bus)
        self._bus = bus
        self._stream = bus.topology.stream(stream)
        self._durable = durable
        self._inbox = bus.client.new_inbox()
        self._messages: deque[Msg] = deque()
        self._woken = asyncio.Event()
        self._pulls = itertools.count()
        self._pull = ""
        self._owed = 0
        self._owed_until = 0.0
        self._connection = 0
        """Number of the connection over which the pull was sent."""
        self._rejected = False
        self._gone_s: float | None = None
        """When the consumer was found gone, on the monotonic clock."""
        self._subscription: Subscription | None = None

    @property
    def ready(self) -> int:
        return len(self._messages)

    async def take(self, limit: int, timeout_s: float = POLL_S) -> list[Msg]:
        """Return up to `limit` messages that are there, at least one unless `timeout_s` passes.

        Raises `BusError` when the consumer or its stream has been gone for `GONE_S`, or the connection was
        closed."""
        deadline = time.monotonic() + timeout_s
        while not self._messages and (left := deadline - time.monotonic()) > 0:
            self._woken.clear()
            await self._ask(limit)
            wait_s = left if self._is_owed() else min(left, RETRY_S)
            if await set_within(self._woken, min(wait_s, POLL_S)) and self._rejected:
                await self._refuse_missing_consumer()
        return [self._messages.popleft() for _ in range(min(limit, len(self._messages)))]

    async def give_back(self) -> None:
        """Stop receiving, and return messages that were not taken to the stream at once. `take` resumes."""
        subscription, self._subscription = self._subscription, None
        self._owed = 0
        try:
            if subscription is not None and self._bus.client.is_connected:
                await subscription.drain()  # waits for what the server has already sent
            elif subscription is not None:
                await subscription.unsubscribe()
            while self._messages:
                await self._messages.popleft().nak()
            await self.parts.give_back()
        except nats.errors.Error as error:  # the bus is away: the ack wait gives them back
            log.warning("messages_not_given_back", consumer=self._durable, reason=str(error))
        self._messages.clear()

    async def _ask(self, limit: int) -> None:
        """Ask for `limit` messages unless a pull is outstanding or the server is away: pulls would add up."""
        client = self._bus.client
        if client.is_closed:
            raise BusError(f"{self._stream}/{self._durable}: the connection to the bus was closed")
        if not client.is_connected or self._is_owed():
            return
        await self._forget_broken_pull()
        if self._subscription is None:
            self._subscription = await client.subscribe(
                f"{self._inbox}.*",
                cb=self._on_message,
                pending_bytes_limit=0,  # no limit here: `limit` bounds the messages, and none may be dropped
            )
        self._pull = f"{self._inbox}.{next(self._pulls)}"
        pull_s = min(PULL_S * self._bus.slower, LONGEST_PULL_S)
        self._owed, self._owed_until = limit, time.monotonic() + pull_s + RETRY_S
        self._connection = client.stats["reconnects"]
        request = json.dumps({"batch": limit, "expires": int(pull_s * 1e9)}).encode()
        subject = f"{self._bus.js_api}.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}"
        await client.publish(subject, request, reply=self._pull)

    def _is_owed(self) -> bool:
        """Return whether a pull waits on the server. One of an earlier connection may be lost."""
        client = self._bus.client
        same = client.is_connected and client.stats["reconnects"] == self._connection
        return same and self._owed > 0 and time.monotonic() < self._owed_until

    async def _forget_broken_pull(self) -> None:
        """Listen elsewhere, if the connection was made again: what the old pull still brings would be more
        than was asked for."""
        if self._subscription is None or self._bus.client.stats["reconnects"] == self._connection:
            return
        subscription, self._subscription = self._subscription, None
        self._inbox = self._bus.client.new_inbox()
        await subscription.unsubscribe()

    async def _on_message(self, raw: Msg) -> None:
        """Keep a message. A status message ends the pull that it answers."""
        if not (raw.headers and "Status" in raw.headers):
            self._owed -= 1
            if _can_be_acked(raw):
                self._messages.append(raw)
                self._woken.set()
        elif raw.subject == self._pull:
            self._on_status(raw.headers["Status"], raw.headers.get("Description", ""))

    def _on_status(self, status: str, description: str) -> None:
        self._owed = 0
        self._rejected = status not in ("404", "408")  # 404: nothing there, 408: expired
        if self._rejected:
            log.warning(
                "pull_ended", stream=self._stream, consumer=self._durable, reason=description or status
            )
        self._woken.set()

    async def _refuse_missing_consumer(self) -> None:
        """Raise if the consumer has been gone for `GONE_S`, although storage makes it again; else wait a
        little."""
        self._rejected = False
        try:
            await self._bus.js.consumer_info(self._stream, self._durable)
        except NotFoundError as error:
            now = time.monotonic()
            self._gone_s = now if self._gone_s is None else self._gone_s
            if now - self._gone_s >= GONE_S:
                raise BusError(
                    f"{self._stream} has no consumer {self._durable} ({error.description}): "
                    "restart the run's storage, which makes it"
                ) from error
        except nats.errors.Error as error:
            log.warning("consumer_not_seen", consumer=self._durable, reason=str(error))
        else:
            self._gone_s = None
        await asyncio.sleep(RETRY_S)


def _can_be_acked(raw: Msg) -> bool:
    """Return whether a message says its origin. If that was garbled on the way, it is dropped here: after
    the ack wait the server delivers it again."""
    try:
        return bool(raw.metadata.sequence)
    except (nats.errors.Error, ValueError, IndexError, OverflowError, OSError) as error:  # of a time, too
        log.warning("message_garbled", subject=raw.subject, reply=raw.reply, reason=repr(error))
        return False


Room = Callable[[int], Awaitable[int]]
"""Returns how many messages to take, at most as many as it is given. It waits a moment before it says 0."""


async def everything(most: int) -> int:
    """Take as many messages as there are places for."""
    return most


async def consume(
    inbox: Inbox, bus: Bus, expected: type[M], handle: Callable[[M], Awaitable[None]], *,
    stop: asyncio.Event, concurrency: int,
) -> None:  # fmt: skip
    """Run `handle` on each message, `concurrency` at a time, until `stop` is set; then finish those begun.

    The ack follows `handle`, so a crash means redelivery: `handle` must be idempotent. While it runs, the
    message is reported as in progress. A message that `handle` refuses by `SchemaError` is set aside, by
    `HandBackError` delivered to others. Any other failure cancels the siblings and propagates; the
    supervisor restarts the process."""

    async def handle_message(received: Received[M]) -> None:
        await handle(received.message)

    await consume_received(inbox, bus, expected, handle_message, stop=stop, concurrency=concurrency)


async def consume_received(
    inbox: Inbox, bus: Bus, expected: type[M], handle: Callable[[Received[M]], Awaitable[None]], *,
    stop: asyncio.Event, concurrency: int, room: Room = everything,
) -> None:  # fmt: skip
    """Do what `consume` does, for a `handle` that takes the message with its handle on the stream.

    `room` says how many of the messages for which there are places are taken; those that are here already
    are handled whatever it says."""
    slots = asyncio.Semaphore(concurrency)
    busy = 0

    async def process(received: Received[M]) -> None:
        nonlocal busy
        try:
            await while_reporting_progress(received, handle)
            await received.ack()
        except SchemaError as error:  # a retry cannot help
            await received.handle.set_aside(bus, error)
        except HandBackError as error:
            log.info("message_handed_back", subject=received.handle.subject, reason=str(error))
            await received.hand_back()
        finally:
            busy -= 1
            slots.release()

    async with inbox.parts.tended(), asyncio.TaskGroup() as tasks:  # leaving waits for work in flight
        while not stop.is_set():
            async with slots:  # at least one slot is free
                if stop.is_set():  # `stop` was set while we waited for a slot
                    break
                limit = inbox.ready or await room(concurrency - busy)
                if not limit:
                    continue
                limit = min(limit, concurrency - busy)
                arrived = await understood(await inbox.take(limit, POLL_S), bus, expected, inbox.parts)
            for received in arrived:
                await slots.acquire()
                busy += 1
                tasks.create_task(process(received), name=f"consume {received.handle.subject}")
            await asyncio.sleep(0)  # what was taken begins before `room` is asked again
        await inbox.give_back()


def nothing_apart(_: Message) -> int:
    """Return 0: all of a message is in its bytes."""
    return 0


async def consume_batches(
    inbox: Inbox, bus: Bus, expected: type[M], handle: Callable[[list[M]], Awaitable[None]], *,
    stop: asyncio.Event, limit: int, linger_s: float = 0.0, apart_bytes: Callable[[M], int] = nothing_apart,
) -> None:  # fmt: skip
    """Run `handle` on what has arrived, `limit` messages at most, one batch after the other, until `stop`.

    While it works on one batch the next messages are taken and decoded, so a batch under load is what came
    meanwhile. After an idle time a batch may grow for `linger_s`. Messages keep their order. `stop` ends the
    taking; messages that were taken are handled. `apart_bytes` says how much memory `handle` needs for what a
    message names and does not hold: a batch ends with the message that brings it to `AHEAD_BYTES`.

    The acks follow `handle`, which must be idempotent. Until then the messages are reported as in progress.
    `handle` may raise `SchemaError` before it has done anything: then it gets the messages one by one, and
    those that it refuses again are set aside."""
    batch: list[Received[M]] = []
    async with inbox.parts.tended():
        ahead = _Ahead(inbox, bus, expected, limit, apart_bytes)
        taking = asyncio.create_task(ahead.take(stop), name="take ahead")
        beating = asyncio.create_task(report_progress(lambda: [*batch, *ahead.ready]), name="report progress")
        try:
            while batch := await ahead.batch(linger_s):
                for received in await _handled(batch, bus, handle):
                    await received.ack()
            await taking
        finally:
            await cancelled(taking, beating)
        await inbox.give_back()


class _Ahead(Generic[M]):
    """Decoded messages that wait for their turn: less than two batches, about `AHEAD_BYTES` at most."""

    def __init__(
        self, inbox: Inbox, bus: Bus, expected: type[M], limit: int, apart_bytes: Callable[[M], int]
    ) -> None:
        self._apart_bytes = apart_bytes
        self._inbox = inbox
        self._bus = bus
        self._expected = expected
        self._limit = limit
        self.ready: deque[Received[M]] = deque()
        """Messages that wait, in order."""
        self._size_bytes = 0
        self._changed = asyncio.Event()
        self._ended = False

    async def take(self, stop: asyncio.Event) -> None:
        """Take what arrives, as far as there is room, until `stop`."""
        try:
            while not stop.is_set():
                if len(self.ready) >= self._limit or self._size_bytes >= AHEAD_BYTES:
                    await self._next_change(POLL_S)
                    continue
                raw = await self._inbox.take(self._limit, POLL_S)
                arrived = await understood(raw, self._bus, self._expected, self._inbox.parts)
                self.ready += arrived
                self._size_bytes += sum(map(self._bytes_of, arrived))
                self._changed.set()
        finally:
            self._ended = True
            self._changed.set()

    async def batch(self, linger_s: float) -> list[Received[M]]:
        """Return the next messages, at most `limit`; none when taking has ended and all were returned."""
        while not self.ready and not self._ended:
            await self._next_change(POLL_S)
        linger_until = time.monotonic() + linger_s
        while len(self.ready) < self._limit and not self._ended:
            if (left := linger_until - time.monotonic()) <= 0:
                break
            await self._next_change(left)
        batch: list[Received[M]] = []
        size_bytes = 0
        while self.ready and len(batch) < self._limit and size_bytes < AHEAD_BYTES:
            batch.append(self.ready.popleft())
            size_bytes += self._bytes_of(batch[-1])
        self._size_bytes -= size_bytes
        self._changed.set()
        return batch

    def _bytes_of(self, received: Received[M]) -> int:
        return len(received.handle.data) + self._apart_bytes(received.message)

    async def _next_change(self, timeout_s: float) -> None:
        self._changed.clear()
        await set_within(self._changed, timeout_s)


async def _handled(
    batch: list[Received[M]], bus: Bus, handle: Callable[[list[M]], Awaitable[None]]
) -> list[Received[M]]:
    if not batch:
        return []
    try:
        await handle([received.message for received in batch])
    except SchemaError as error:
        if len(batch) == 1:
            await batch[0].handle.set_aside(bus, error)
            return []
    else:
        return batch
    return [received for one in batch for received in await _handled([one], bus, handle)]
