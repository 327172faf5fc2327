"""Reads a stream in order from a place that its reader remembers. The server keeps nothing about a reader."""

import json
from calendar import timegm
from dataclasses import dataclass
from time import strptime

import nats.errors
from nats.aio.msg import Msg

from bus.connection import Bus
from bus.errors import BusError
from bus.waiting import GarbledAnswerError

ANSWER_TIMEOUT_S = 10.0
"""Longest time between two messages of an answer."""
NONE_THERE = "404"
END = "204"


@dataclass(frozen=True)
class StreamPosition:
    """The last message that was read: its number on the stream and when the server stored it.

    Both are kept, since a stream that is made anew, or put back to an older state, gives numbers again. A
    place without a time is taken as it is."""

    sequence: int = 0
    time_ns: int = 0


@dataclass(frozen=True)
class StoredMessage:
    """A message of the stream."""

    subject: str
    data: bytes
    place: StreamPosition

    @property
    def time_s(self) -> float:
        """Return when the server stored it, in seconds since the epoch."""
        return self.place.time_ns / 1e9


class StreamReader:
    """Gives each message of a stream once, in order, also over outages and restarts of the bus.

    It asks for messages after the last one by their numbers, so nothing has to be acknowledged, and a reader
    needs no right to make a consumer. Messages that the stream dropped before they were read are skipped. The
    server must be nats-server 2.11 or later, and the stream must allow direct reads."""

    def __init__(self, bus: Bus, stream: str, subject: str, *, after: StreamPosition | None = None) -> None:
        """Read messages of `subject`, which may hold wildcards, after a place; by default from the first."""
        self.place = after or StreamPosition()
        self._bus = bus
        self._stream = bus.topology.stream(stream)
        self._subject = subject
        self.beginnings = 0
        """Number of times that the reader began anew, on a stream that gives numbers again."""
        self._checked_at = -1
        self._skip_until_ns = 0

    async def take(self, limit: int) -> list[StoredMessage]:
        """Return the next messages that are there now, at most `limit`. Raises `BusError` when the bus is
        away or has no such stream."""
        if self._checked_at != (connection := self._bus.client.stats["reconnects"]):
            await self._check_place()
            self._checked_at = connection
        found = await self._get(self.place.sequence + 1, limit)
        if found:
            self.place = found[-1].place
        return [message for message in found if message.place.time_ns > self._skip_until_ns]

    async def _check_place(self) -> None:
        """Begin anew on a stream that is another than the one before, or was put back: what is older than the
        last message that was read is skipped."""
        if not self.place.time_ns:
            return
        at = await self._get(self.place.sequence, 1, subject=">")
        if at and (at[0].place == self.place or at[0].place.sequence > self.place.sequence):
            return  # the message is there, or was dropped as old
        self._skip_until_ns = max(self._skip_until_ns, self.place.time_ns)
        self.place = StreamPosition()
        self.beginnings += 1

    async def _get(self, first: int, limit: int, subject: str | None = None) -> list[StoredMessage]:
        client, answer = self._bus.client, self._bus.client.new_inbox()
        wanted = {"seq": first, "batch": limit, "next_by_subj": subject or self._subject}
        if not client.is_connected:
            raise BusError(f"{self._stream}: the bus is away") from nats.errors.ConnectionReconnectingError()
        found: list[StoredMessage] = []
        try:
            replies = await client.subscribe(answer, pending_bytes_limit=0)
            try:
                request = f"$JS.API.DIRECT.GET.{self._stream}"
                await client.publish(request, json.dumps(wanted).encode(), reply=answer)
                while True:
                    raw = await replies.next_msg(timeout=ANSWER_TIMEOUT_S)
                    message = self._read(raw, found)
                    if message is None:
                        return found
                    found.append(message)
            finally:
                await replies.unsubscribe()
        except (nats.errors.Error, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise BusError(f"cannot read {self._stream}: {reason}") from error

    def _read(self, raw: Msg, before: list[StoredMessage]) -> StoredMessage | None:
        headers = raw.headers or {}
        if (status := headers.get("Status")) is not None:
            if status in (NONE_THERE, END):
                return None
            if status == "503":
                raise nats.errors.NoRespondersError
            raise BusError(f"cannot read {self._stream}: {status} {headers.get('Description', '')}")
        last = before[-1].place.sequence if before else 0
        try:
            after = int(headers["Nats-Last-Sequence"])
            place = StreamPosition(int(headers["Nats-Sequence"]), _nanoseconds(headers["Nats-Time-Stamp"]))
            message = StoredMessage(headers["Nats-Subject"], raw.data, place)
        except (KeyError, ValueError) as error:
            raise GarbledAnswerError(f"a message of {self._stream} without its place: {error!r}") from error
        if after != last:  # the connection broke, and the rest came over a new one
            raise BusError(
                f"cannot read {self._stream}: a part is missing"
            ) from nats.errors.StaleConnectionError()
        return message


def _nanoseconds(time: str) -> int:
    """Return the time of an RFC 3339 text in UTC, such as 2026-11-24T14:02:24.76803333Z."""
    seconds, _, fraction = time.removesuffix("Z").partition(".")
    return timegm(strptime(seconds, "%Y-%m-%dT%H:%M:%S")) * 10**9 + int(fraction.ljust(9, "0") or 0)
