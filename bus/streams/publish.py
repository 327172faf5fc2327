"""Publishing to a stream so that every message is stored exactly once.

nats-py's `publish_async` never resolves on a rejection or a disconnect, so this keeps its own reply inbox,
sends each message under a `Nats-Msg-Id`, and sends it again until the server has acknowledged it."""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import nats.errors
import structlog
from nats.aio.msg import Msg

from bus.connection import Bus
from bus.connection.answers import HEADER_BYTES
from bus.errors import BusAwayError, BusError
from bus.messages import stores_nothing
from bus.security.stream_access import MESSAGE_ID
from bus.streams.message_parts import PART_BYTES, split
from bus.topology import stream_of

log = structlog.get_logger()
ACK_TIMEOUT_S = 2.0
UNANSWERED = 5
"""Attempts in a row before a stream is reported as not storing: 12 s, longer than an election of a leader."""
NO_ANSWER = 408
LONGEST_PAUSE_S = 0.5
LARGE_BYTES = 64 << 10
LARGE_PAUSE_S = 5.0
"""Longest pause before a message of `LARGE_BYTES` is sent again whole to a stream that is full."""
STREAM_FULL = frozenset({10077, 10047, 10023})
"""Error codes of `discard: new` and of resource limits: wait, since space returns as others ack."""
PARTS_IN_FLIGHT = 16
"""Parts that await their ack at a time: few enough for a slow connection to ack them in `ACK_TIMEOUT_S`."""
T = TypeVar("T")
Answer = dict[str, object]
Refusal = Literal["refused", "unanswered"]
"""Why a message is sent again: the stream refuses it for now, or nobody answered."""


class StreamAck(NamedTuple):
    """The stream's word that it has stored a message."""

    sequence: int
    """Number of the message on its stream, or of its last part."""
    duplicate: bool
    """Says whether the stream had a message of this id before, such as an earlier attempt of this one."""


@dataclass(frozen=True, slots=True)
class _Awaited:
    """An ack that has not come, and when the message is sent again without it."""

    ack: asyncio.Future[Answer]
    until: float


@dataclass
class PublishCounts:
    """Counts of the server's answers so far."""

    stored: int = 0
    duplicates: int = 0
    retries: int = 0
    refused_full: int = 0


class Publisher:
    """Publishes pipelined and deduplicated over one connection; `window` messages await their ack at a time.
    A message above `part_bytes` travels in parts, one such message after another; None sends all whole."""

    def __init__(self, bus: Bus, *, window: int = 256, part_bytes: int | None = PART_BYTES) -> None:
        self.counts = PublishCounts()
        self._bus = bus
        self._part_bytes = part_bytes or sys.maxsize
        self._slots = asyncio.Semaphore(window)
        self._one_in_parts = asyncio.Lock()
        self._inbox = bus.client.new_inbox()
        self._awaited: dict[str, _Awaited] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._tokens = itertools.count()
        self._subscribed = False

    async def publish(
        self, subject: str, data: bytes, *, message_id: str, timeout_s: float | None = None
    ) -> StreamAck:
        """Return once the stream has stored `data`, however often that takes.

        Raises `BusError` when the message or its parts are larger than the server takes, or when the server
        refuses it for a reason that waiting cannot mend, and `BusAwayError` after `timeout_s` or when the bus
        is away for longer than this process waits; None is the patience that all processes have for the bus.
        """
        began = time.monotonic()
        deadline = began + (self._bus.patience_s if timeout_s is None else timeout_s)
        try:
            if len(data) <= self._part_bytes:
                return await self._publish(subject, data, {MESSAGE_ID: message_id}, deadline)
            async with self._one_in_parts:  # the consumer holds one message instead of many
                parts = split(data, message_id, self._part_bytes)
                return await self._publish_parts(subject, parts, deadline)
        except TimeoutError as error:
            waited_s = time.monotonic() - began
            raise BusAwayError(f"{subject}: {message_id} was not stored within {waited_s:.1f} s") from error

    async def _publish_parts(
        self, subject: str, parts: Iterator[tuple[dict[str, str], bytes]], deadline: float
    ) -> StreamAck:
        acks: list[StreamAck] = []

        async def send_next() -> None:
            for headers, part in parts:
                acks.append(await self._publish(subject, part, headers, deadline))

        await together(send_next() for _ in range(PARTS_IN_FLIGHT))
        return StreamAck(max(ack.sequence for ack in acks), any(ack.duplicate for ack in acks))

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str], deadline: float
    ) -> StreamAck:
        limit = self._bus.client.max_payload  # for data and headers: a server closes the connection above it
        if len(data) + HEADER_BYTES + sum(len(value.encode()) for value in headers.values()) > limit:
            raise BusError(
                f"{subject}: {len(data)} bytes exceed the server's max_payload of {limit}: raise it"
            )
        pause, unanswered, heard_s = 0.02, 0, time.monotonic()
        longest_s = LARGE_PAUSE_S if len(data) >= LARGE_BYTES else LONGEST_PAUSE_S
        async with self._slots:
            while not isinstance(outcome := await self._send(subject, data, headers), StreamAck):
                if outcome == "refused":
                    heard_s = time.monotonic()
                if time.monotonic() > min(deadline, heard_s + self._bus.longest_outage_s):
                    raise TimeoutError
                silent = outcome == "unanswered" and self._bus.client.is_connected
                unanswered = unanswered + 1 if silent else 0
                if unanswered >= UNANSWERED:
                    await self._warn(subject)
                self.counts.retries += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest_s if outcome == "refused" else LONGEST_PAUSE_S)
        if self._bus.not_storing:
            self._bus.not_storing.discard(stream_of(subject))
        return outcome

    async def _warn(self, subject: str) -> None:
        """Report once that a stream does not store, unless the whole server does not answer."""
        stream = stream_of(subject)
        try:
            await self._bus.client.flush(timeout=ACK_TIMEOUT_S)
        except nats.errors.Error as error:
            log.debug("server_does_not_answer", reason=str(error) or type(error).__name__)
            return
        if stream not in self._bus.not_storing:
            self._bus.not_storing.add(stream)
            log.warning("bus_does_not_store", stream=stream, reason=stores_nothing([stream]))

    async def _send(self, subject: str, data: bytes, headers: dict[str, str]) -> StreamAck | Refusal:
        if not self._bus.client.is_connected:
            return "unanswered"
        if not self._subscribed:
            self._subscribed = True
            await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._on_ack)
        token = str(next(self._tokens))
        ack: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited[token] = _Awaited(ack, time.monotonic() + ACK_TIMEOUT_S)
        self._sweep_later()
        try:
            await self._bus.client.publish(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
            answer = await ack
        except nats.errors.Error as error:
            log.debug("publish_retry", subject=subject, reason=str(error))
            return "refused"
        finally:
            self._awaited.pop(token, None)
        return self._outcome(subject, answer)

    def _sweep_later(self) -> None:
        """Set one timer for all messages that wait: one each costs more than the rest of a small publish."""
        if self._sweep is None and self._awaited:
            oldest = next(iter(self._awaited.values())).until
            delay = max(oldest - time.monotonic(), ACK_TIMEOUT_S / 10)
            self._sweep = asyncio.get_running_loop().call_later(delay, self._give_up_on_the_late)

    def _give_up_on_the_late(self) -> None:
        now = time.monotonic()
        for awaited in self._awaited.values():  # in the order of sending
            if awaited.until > now:
                break
            if not awaited.ack.done():
                awaited.ack.set_result({"error": {"code": NO_ANSWER}})
        self._sweep = None
        self._sweep_later()

    def _outcome(self, subject: str, answer: Answer) -> StreamAck | Refusal:
        error = answer.get("error")
        if not isinstance(error, dict):
            ack = StreamAck(int(str(answer["seq"])), bool(answer.get("duplicate")))
            self.counts.duplicates += ack.duplicate
            self.counts.stored += not ack.duplicate
            return ack
        if error.get("code") == NO_ANSWER:
            return "unanswered"
        if error.get("err_code") in STREAM_FULL:
            self.counts.refused_full += 1
        elif error.get("code") != 503:  # 503: no leader, or no stream yet
            raise BusError(f"{subject}: the stream refuses: {error.get('description')}")
        return "refused"

    async def _on_ack(self, raw: Msg) -> None:
        awaited = self._awaited.get(raw.subject.rsplit(".", 1)[1])
        if awaited is None or awaited.ack.done():
            return
        ack = awaited.ack
        if raw.headers and raw.headers.get("Status") == "503":
            ack.set_result({"error": {"code": 503}})
        else:
            ack.set_result(_read_ack(raw))


def _read_ack(raw: Msg) -> Answer:
    """Return the server's answer. A garbled one counts as none: the message is sent again by its id."""
    try:
        answer: dict[str, Any] = json.loads(raw.data)
        if "code" in answer["error"] if "error" in answer else answer["seq"] > 0:
            return answer
        reason = f"{answer} is no answer of a stream"
    except (ValueError, KeyError, TypeError) as error:
        reason = repr(error)
    log.warning("publish_answer_garbled", reason=reason[:200])
    return {"error": {"code": NO_ANSWER}}


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; raise the first error itself, no group, after the others were cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]
