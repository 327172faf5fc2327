"""Splits a message that is too large to travel whole into numbered parts, and puts them together again.

Parts of one message are on one subject and must reach one consumer: a durable that several processes pull
from wants whole messages (`Publisher(bus, part_bytes=None)`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import nats.errors
import structlog
import xxhash
from nats.aio.msg import Msg

from bus.codec import encode
from bus.connection import Bus
from bus.errors import BusError, SchemaError
from bus.messages import DeadLetter
from bus.security.stream_access import MESSAGE_ID, plain_id
from bus.topology import ACK_WAIT_S, DUPLICATE_WINDOW_S

log = structlog.get_logger()
PART_BYTES = 512 << 10
SET = "Sluice-Set"
"""Header of a part: `<n>/<parts>/<bytes of the message>/<xxh3-128 of the message>`, n from 0."""
MAX_PARTS = 1 << 14
"""A consumer may have 65536 messages unacked; one set must not take them all."""
HELD_BYTES = 512 << 20
"""Bytes that the incomplete sets of one consumer may reserve together; also the largest message."""
INCOMPLETE_S = 900.0
"""Age at which a set is dropped. Publishers give up after 600 s, so it was never reported as published."""
STALLED_S = 60.0
"""Seconds without a new part after which a set gives way to others; redelivery takes less."""
LONGEST_DELAY_S = 20.0
LONGEST_LOOK_S = 5.0
"""Upper bound on the time counted between two looks; a consumer that pulls looks more often."""
OnUnreadable = Callable[[str, str, SchemaError], Awaitable[None]]
"""Is called with subject, message id and error of a message that nobody can read, before it is set aside."""


class SetKey(NamedTuple):
    """Key that the parts of one attempt to publish one message have in common."""

    subject: str
    message_id: str
    parts: int
    size_bytes: int
    digest: str


def split(data: bytes, message_id: str, part_bytes: int) -> Iterator[tuple[dict[str, str], bytes]]:
    """Return the parts of `data` with their headers.

    The digest is in each part's id: a second attempt with other bytes is no duplicate of the first, whose
    parts may have stayed without their siblings."""
    digest = xxhash.xxh3_128_hexdigest(data)
    view = memoryview(data)
    parts = -(-len(data) // part_bytes)
    for n in range(parts):
        headers = {
            MESSAGE_ID: f"{message_id}.{digest}.{n}of{parts}",
            SET: f"{n}/{parts}/{len(data)}/{digest}",
        }
        yield headers, bytes(view[n * part_bytes : (n + 1) * part_bytes])


def _place(raw: Msg) -> tuple[SetKey, int]:
    """Return the set of a part and its number there. Raises `SchemaError` for headers that are not ours."""
    headers = raw.headers or {}
    try:
        number, parts, size, digest = headers[SET].split("/")
        key = SetKey(raw.subject, "", int(parts), int(size), digest)
        n = int(number)
    except ValueError as error:
        raise SchemaError(f"{SET} {headers[SET][:100]!r} does not place a part: {error}") from error
    name, found, _ = plain_id(headers).rpartition(f".{digest}.{n}of{parts}")
    if not (found and 0 <= n < key.parts <= MAX_PARTS and 0 < len(raw.data) <= key.size_bytes):
        raise SchemaError(f"{SET} {headers[SET][:100]!r} does not fit a part of {len(raw.data)} bytes")
    return key._replace(message_id=name), n


@dataclass(frozen=True)
class StreamMessage:
    """A message as it was published, and the messages of the stream that carried it."""

    data: bytes
    raws: Sequence[Msg]
    key: SetKey | None = None
    parts: "Parts | None" = None

    @property
    def subject(self) -> str:
        """Subject that the message was published on."""
        return str(self.raws[0].subject)

    @property
    def message_id(self) -> str:
        """Id that it was published under; empty where it had none."""
        return self.key.message_id if self.key else plain_id(self.raws[0].headers)

    async def ack(self) -> None:
        try:
            for raw in self.raws:
                await raw.ack()
        except nats.errors.Error as error:
            raise BusError(f"cannot ack {self.subject}: {error}") from error
        if self.parts is not None and self.key is not None:
            await self.parts.settle(self.key)

    async def set_aside(self, bus: Bus, error: SchemaError) -> None:
        """Move the message to DEAD, with this reason."""
        await set_aside(self.raws, self.data, bus, str(error), kind=error.kind, actor=error.actor)
        if self.parts is not None and self.key is not None:
            self.parts.forget(self.key)


@dataclass
class _Set:
    raws: dict[int, Msg]
    size_bytes: int
    held_since: float
    """Says when the set was put aside, on the clock of `Parts`."""


@dataclass
class _Progress:
    most: int
    since: float
    """Says when the first part came, on the clock of `Parts`."""


class Parts:
    """Puts the parts that one consumer receives together. Incomplete messages wait here, within bounds.

    A set reserves the size of its message when its first part comes. Without memory the part is sent back for
    later, so sets that began first are completed first. Nothing here outlives the process: unacked parts
    are redelivered."""

    def __init__(
        self, bus: Bus, *, held_bytes: int = HELD_BYTES, incomplete_s: float = INCOMPLETE_S,
        on_unreadable: OnUnreadable | None = None,
    ) -> None:  # fmt: skip
        self._bus = bus
        self._limit_bytes = held_bytes
        self._on_unreadable = on_unreadable
        self._incomplete_s = incomplete_s
        self._sets: dict[SetKey, _Set] = {}
        self._progress: dict[SetKey, _Progress] = {}
        self._handed_out: set[SetKey] = set()
        self._settled: dict[tuple[str, str], float] = {}
        self._looked_s = 0.0
        self._looked_at = time.monotonic()

    @property
    def held_bytes(self) -> int:
        return sum(held.size_bytes for held in self._sets.values())

    async def collect(self, raws: Sequence[Msg]) -> list[StreamMessage]:
        """Return the messages that `raws` completes: unsplit ones, and sets that are now full."""
        self._tick()
        messages = []
        for raw in raws:
            if not (raw.headers and SET in raw.headers):
                messages.append(StreamMessage(raw.data, (raw,)))
                continue
            try:
                completed = await self._add(raw)
            except SchemaError as error:  # no part of it is ever joined: whoever sent it is not to wait
                if self._on_unreadable is not None:
                    await self._on_unreadable(raw.subject, plain_id(raw.headers), error)
                await set_aside([raw], raw.data, self._bus, str(error))
            else:
                messages += [completed] if completed is not None else []
        return messages

    async def refuse(self, message: StreamMessage, error: SchemaError) -> None:
        """Set a message aside that cannot be read, after whoever reads here was told."""
        if self._on_unreadable is not None:
            await self._on_unreadable(message.subject, message.message_id, error)
        await message.set_aside(self._bus, error)

    async def settle(self, key: SetKey) -> None:
        """Note that a message was handled: drop other attempts to publish it, and parts that come again."""
        self.forget(key)
        now = time.monotonic()
        self._settled[key.subject, key.message_id] = now
        self._settled = {name: at for name, at in self._settled.items() if now - at < DUPLICATE_WINDOW_S}
        for other in [k for k in self._sets if (k.subject, k.message_id) == (key.subject, key.message_id)]:
            self._progress.pop(other, None)
            held = self._sets.pop(other, None)
            for raw in held.raws.values() if held else ():
                await _try(raw.ack())

    def forget(self, key: SetKey) -> None:
        """Note that nobody holds this message any longer."""
        self._handed_out.discard(key)

    async def give_back(self) -> None:
        """Return incomplete sets to the stream at once."""
        for key in list(self._sets):
            await self._release(key, delay_s=0)

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Report incomplete sets as in progress while inside; sets that are too old go to DEAD."""
        tending = asyncio.create_task(self._tend(), name="tend parts")
        try:
            yield
        finally:
            tending.cancel()
            for known in (self._sets, self._progress, self._handed_out, self._settled):
                known.clear()

    def _tick(self) -> None:
        """Count the time in which parts could come: a busy event loop, or one cut off, must drop no set."""
        now = time.monotonic()
        if self._bus.client.is_connected:
            self._looked_s += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now

    async def _add(self, raw: Msg) -> StreamMessage | None:
        key, n = _place(raw)
        if key.size_bytes > self._limit_bytes:
            raise SchemaError(
                f"a message of {key.size_bytes} bytes does not fit: this consumer holds {self._limit_bytes}"
            )
        settled_at = self._settled.get((key.subject, key.message_id))
        if settled_at is not None and time.monotonic() - settled_at < DUPLICATE_WINDOW_S:
            await _try(raw.ack())
            return None
        if key in self._handed_out:  # redelivered meanwhile: the ack to come covers it
            return None
        if key not in self._sets and not await self._reserve(key):
            await _try(raw.nak(delay=min(2.0**raw.metadata.num_delivered, LONGEST_DELAY_S)))
            return None
        superfluous = self._keep(key, n, raw)
        completed = await self._completed(key)
        if superfluous is not None:
            await _try(superfluous.ack())
        return completed

    async def _reserve(self, key: SetKey) -> bool:
        """Reserve the message's size, at the cost of sets that gain no parts; return False if it fails."""
        for other in list(self._sets):
            if self._fits(key):
                break
            if other in self._sets and self._idle_s(other) > STALLED_S:
                await self._release(other, delay_s=LONGEST_DELAY_S)
        if not self._fits(key):
            return False
        self._sets[key] = _Set({}, 0, held_since=self._looked_s)
        self._progress.setdefault(key, _Progress(0, since=self._looked_s))
        return True

    def _fits(self, key: SetKey) -> bool:
        return sum(known.size_bytes for known in self._sets) + key.size_bytes <= self._limit_bytes

    def _idle_s(self, key: SetKey) -> float:
        return self._looked_s - max(self._progress[key].since, self._sets[key].held_since)

    def _keep(self, key: SetKey, n: int, raw: Msg) -> Msg | None:
        held = self._sets[key]
        known = held.raws.get(n)
        size_bytes = held.size_bytes + len(raw.data) - (len(known.data) if known else 0)
        if size_bytes > key.size_bytes:
            raise SchemaError(f"part {n} of {key.message_id}: the parts exceed {key.size_bytes} bytes")
        held.raws[n] = raw
        held.size_bytes = size_bytes
        if len(held.raws) > self._progress[key].most:
            self._progress[key] = _Progress(len(held.raws), since=self._looked_s)
        again = known is not None and known.metadata.sequence.stream != raw.metadata.sequence.stream
        return known if again else None

    async def _completed(self, key: SetKey) -> StreamMessage | None:
        held = self._sets[key]
        if len(held.raws) < key.parts:
            return None
        del self._sets[key], self._progress[key]
        raws = [held.raws[n] for n in range(key.parts)]
        data = b"".join(raw.data for raw in raws)
        if len(data) != key.size_bytes or xxhash.xxh3_128_hexdigest(data) != key.digest:
            await set_aside(raws, data, self._bus, f"{key.message_id}: the parts do not have their digest")
            return None
        for raw in raws:
            raw.data = b""  # the message has them
        self._handed_out.add(key)
        return StreamMessage(data, raws, key, self)

    async def _release(self, key: SetKey, delay_s: float) -> None:
        held = self._sets.pop(key, None)
        for raw in held.raws.values() if held else ():
            await _try(raw.nak(delay=delay_s))

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(min(ACK_WAIT_S / 3, self._incomplete_s / 4))
            for key in list(self._sets):
                if key in self._sets and self._too_old(key):  # the set may be complete since
                    await self._drop(key)
            for raw in [raw for held in self._sets.values() for raw in held.raws.values()]:
                await _try(raw.in_progress())
            horizon = self._looked_s - 4 * self._incomplete_s
            self._progress = {
                key: p for key, p in self._progress.items() if key in self._sets or p.since > horizon
            }

    def _too_old(self, key: SetKey) -> bool:
        """Return whether a set had no new part for long, although refused parts had time to return."""
        waited_s = self._looked_s - self._progress[key].since
        return waited_s > self._incomplete_s and self._idle_s(key) > min(STALLED_S, self._incomplete_s)

    async def _drop(self, key: SetKey) -> None:
        held = self._sets.pop(key)
        del self._progress[key]
        missing = list(islice((n for n in range(key.parts) if n not in held.raws), 20))
        reason = (
            f"{key.message_id}: {len(held.raws)} of {key.parts} parts came, "
            f"none for {self._incomplete_s:g} s; missing {missing}"
        )
        raws = [held.raws[n] for n in sorted(held.raws)]
        try:
            await set_aside(raws, raws[0].data, self._bus, reason)
        except BusError as error:  # the parts are redelivered and dropped then
            log.warning("parts_not_dropped", message_id=key.message_id, reason=str(error))


async def _try(answer: Awaitable[None]) -> None:
    """Tell the stream about a part; when the bus is away, the ack wait brings the part back."""
    try:
        await answer
    except nats.errors.Error as error:
        log.debug("part_not_answered", reason=str(error))


REASON_CHARS = 1000
ACTOR_CHARS = 100


async def set_aside(
    raws: Sequence[Msg], data: bytes, bus: Bus, reason: str, *, kind: str = "unreadable", actor: str = ""
) -> None:
    """Move a message, one part or all parts of it, to DEAD as one letter. No retry would help.

    `kind` is the last token of the letter's subject, by which the server counts them. Raises `BusError` when
    the bus does not take the letter: then the message stays where it is."""
    first = raws[0]
    log.warning("message_set_aside", subject=first.subject, kind=kind, actor=actor, reason=reason)
    sequence = str(first.metadata.sequence.stream)
    overhead = (
        len(first.subject) + 4 * (REASON_CHARS + ACTOR_CHARS) + 4096
    )  # room for the rest of the letter and its headers
    letter = DeadLetter(
        subject=first.subject,
        reason=reason[:REASON_CHARS],
        data=data[: bus.client.max_payload - overhead],
        origin=sequence,
        kind=kind,
        actor=actor[:ACTOR_CHARS],
    )
    message_id = f"{first.metadata.stream}-{sequence}"

    async def move() -> None:
        headers = {MESSAGE_ID: message_id}
        try:
            await bus.js.publish(bus.subject("dead", kind), encode(letter), headers=headers)
            for raw in raws:
                await raw.term()
        except nats.errors.Error as error:
            raise BusError(f"cannot set {message_id} aside: {error}") from error

    await bus.patiently(move, f"setting {message_id} aside")
