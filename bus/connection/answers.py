"""Answers to requests: sent piece by piece, with a bounded number of bytes on their way, and refusals."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.codec import OTHER_BUILD, M, Message, decode, encode
from bus.errors import BusError, FencedError, NoActorsError, SchemaError, SluiceError, UnreadableGroupsError
from bus.security.permissions import TAKEN
from bus.waiting import GarbledAnswerError

log = structlog.get_logger()
PART = "Sluice-Part"
"""Header that numbers the pieces of one answer, since core NATS may lose some when a connection breaks."""
MORE = "Sluice-More"
"""Header of a message that continues in the next piece, because it is larger than the server accepts."""
HEADER_BYTES = 64
"""Room left for our headers, which the server counts as part of max_payload."""
WINDOW_BYTES = 4 << 20
"""Bytes of an answer that may be on their way. A server cuts off a reader for whom it holds 64 MB, and a
learner reads from all shards at the same time."""
TAKEN_TIMEOUT_S = 30.0
"""Seconds for which the sender waits until the asker has taken a piece."""
THREAD_BYTES = 1 << 16
"""Size from which a message is decoded in a thread, so that the event loop stays responsive."""
INBOXES = ("_INBOX.", "_R_.")
"""Beginnings of the subjects on which answers are awaited. The second one is the server's own, for requests
from another account; no client can name it."""


def is_inbox(subject: str) -> bool:
    """Return whether `subject` is one on which somebody awaits an answer, and not a process or a stream."""
    return subject.startswith(INBOXES)


async def send_answer(client: Client, reply_to: str, messages: Iterable[Message]) -> None:
    """Send each message when the asker has taken enough of those before; one is encoded at a time.

    Raises `nats.errors.Error` when the connection breaks, and `BusError` when the asker is gone or no answer
    is awaited at `reply_to`."""
    if not is_inbox(reply_to):
        raise BusError(f"no answer is awaited at {reply_to!r}: it is no inbox")
    prefix, _, name = client.new_inbox().rpartition(".")
    inbox = f"{prefix}.{TAKEN}.{name}"
    taken = await client.subscribe(f"{inbox}.*")
    waiting: deque[int] = deque()
    numbers = count()
    try:
        for message in messages:
            for piece, more in _pieces(await asyncio.to_thread(encode, message), client.max_payload):
                while waiting and sum(waiting) + len(piece) > WINDOW_BYTES:
                    await _wait_until_taken(taken, reply_to)
                    waiting.popleft()
                number = next(numbers)
                headers = {PART: str(number), **({MORE: "1"} if more else {})}
                await client.publish(reply_to, piece, reply=f"{inbox}.{number}", headers=headers)
                waiting.append(len(piece))
    finally:
        await taken.unsubscribe()


async def receive_answer(
    client: Client, inbox: Subscription, subject: str, *expected: type[Message], timeout_s: float
) -> AsyncIterator[Message]:
    """Yield the messages of one answer, and let the sender know of each piece that was taken.

    Pieces are at most `timeout_s` apart. Raises `BusError` when a piece was lost or nobody serves `subject`,
    `nats.errors.Error` when the answer does not come, and what `read_answer` does."""
    pieces: list[bytes] = []
    for number in count():
        raw = await inbox.next_msg(timeout=timeout_s)
        headers = raw.headers or {}
        if headers.get("Status") == "503":
            raise BusError(nobody_serves(subject))
        if headers.get(PART) != str(number):
            raise BusError(f"{subject}: part {number} of the answer was lost")
        if is_inbox(raw.reply):
            await client.publish(raw.reply)
        pieces.append(raw.data)
        if MORE not in headers:
            yield await _decoded(subject, b"".join(pieces), *expected)
            pieces.clear()


def nobody_serves(subject: str) -> str:
    """Say that the bus knows nobody who listens: a process that stands still is cut off within seconds."""
    return (
        f"nobody serves {subject} now: the process that does is starting, cut off from the bus, or not there"
    )


def _pieces(data: bytes, max_payload: int) -> Iterator[tuple[bytes, bool]]:
    step = max_payload - HEADER_BYTES
    for begin in range(0, len(data), step):
        yield data[begin : begin + step], begin + step < len(data)


async def _wait_until_taken(taken: Subscription, reply_to: str) -> None:
    try:
        raw: Msg = await taken.next_msg(timeout=TAKEN_TIMEOUT_S)
    except nats.errors.TimeoutError as error:
        raise BusError(f"{reply_to} took no piece of its answer for {TAKEN_TIMEOUT_S:g} s") from error
    if (raw.headers or {}).get("Status") == "503":
        raise BusError(f"{reply_to} does not listen any more")


async def _decoded(subject: str, data: bytes, *expected: type[Message]) -> Message:
    if len(data) < THREAD_BYTES:
        return read_answer(subject, data, *expected)
    return await asyncio.to_thread(read_answer, subject, data, *expected)


def read_answer(subject: str, data: bytes, *expected: type[M]) -> M:
    """Decode an answer that came from `subject`.

    Raises `BusError` for a garbled one, which passes when it is asked for again (`bus.waiting.is_away`), and
    `SchemaError` for one of another build."""
    try:
        return decode(data, *expected)
    except SchemaError as error:
        if error.kind == OTHER_BUILD:
            raise
        log.warning("answer_garbled", subject=subject, reason=str(error))
        raise BusError(f"the answer from {subject} is garbled: {error}") from GarbledAnswerError(str(error))


class GarbledRequestError(BusError):
    """The bytes of a request are none that a process of ours sends: whoever sent it asks again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(Message, tag="refused"):
    """The request cannot be served, now or later."""

    reason: str
    code: Literal["", "fenced", "unreadable", "garbled", "no_actors"] = ""
    """The asker raises `FencedError`, `UnreadableGroupsError`, `NoActorsError`, or `BusError` for the others;
    one that passes when it asks again for `garbled`."""
    lease_ids: tuple[int, ...] = ()
    """Leases of the groups that are `unreadable`."""

    @classmethod
    def of_error(cls, error: SluiceError) -> "Refused":
        """Return the refusal that `error` travels as."""
        if isinstance(error, FencedError):
            return cls(reason=str(error), code="fenced")
        if isinstance(error, UnreadableGroupsError):
            return cls(reason=str(error), code="unreadable", lease_ids=error.lease_ids)
        if isinstance(error, NoActorsError):
            return cls(reason=str(error), code="no_actors")
        return cls(reason=str(error), code="garbled" if isinstance(error, GarbledRequestError) else "")

    def error(self, subject: str) -> SluiceError:
        """Return what the process that asked on `subject` raises."""
        reason = f"{subject}: {self.reason}"
        if self.code == "fenced":
            return FencedError(reason)
        if self.code == "unreadable":
            return UnreadableGroupsError(reason, self.lease_ids)
        if self.code == "no_actors":
            return NoActorsError(self.reason)
        refusal = BusError(reason, refusal=self.reason)
        if self.code == "garbled":
            refusal.__cause__ = GarbledAnswerError(self.reason)
        return refusal
