"""One connection to the bus, and everything on it that is not a durable stream: requests, notices, keys."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.codec import OTHER_BUILD, M, Message, decode, encode
from bus.config import BusConfig, StreamsConfig
from bus.connection.answers import (
    HEADER_BYTES,
    PART,
    GarbledRequestError,
    Refused,
    is_inbox,
    nobody_serves,
    read_answer,
    receive_answer,
    send_answer,
)
from bus.connection.client import connected, drain, refuse_other_layout
from bus.connection.jetstream import JetStream
from bus.connection.key_bucket import Entry, KeyBucket
from bus.connection.process_state import ProcessState
from bus.errors import BusAwayError, BusError, ConfigError, SchemaError, SluiceError, UnsignedError
from bus.process.log_throttle import LogThrottle
from bus.requests import Done
from bus.security.credentials import load_credentials
from bus.security.record_rules import record_of
from bus.topology import Topology
from bus.waiting import REMIND_S, RETRY_S, is_away, longest_outage_s, until_answered

if TYPE_CHECKING:  # loads cryptography, which only a secured bus needs
    from bus.security.signatures import Signatures

log = structlog.get_logger()
R = TypeVar("R", bound=Message)
T = TypeVar("T")
SAY_AFTER_S = 2.0
"""Seconds after which a process says what it waits for."""
SAY_LOST_S = 60.0
"""Seconds between two lines about notices that could not be sent."""
BROKEN = (
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.StaleConnectionError,
)
"""Errors of a connection that broke."""
OWNER_S = 4.0
"""Seconds in which the owner of a key writes again what somebody else has overwritten."""


class Bus:
    """A connection, with the names of the run it serves.

    What it is asked while the bus is away waits until the bus is back, for `patience_s` at most; nothing is
    sent into a broken connection. Only `request`, `request_many` and `swap` fail at once, since what they ask
    may have been done: their callers know whether to ask again."""

    def __init__(
        self,
        client: Client,
        run: str,
        *,
        streams: StreamsConfig | None = None,
        patience_s: float = BusConfig().patience_s,
        stop: asyncio.Event | None = None,
        domain: str | None = None,
        signatures: "Signatures | None" = None,
        state: ProcessState | None = None,
    ) -> None:
        self.client = client
        self.state = state or ProcessState()
        """What probes of this process are told."""
        self.state.client = client
        self.patience_s = patience_s
        self.signatures = signatures
        """Signs and verifies records on a bus that lets in only who has credentials; None on another one."""
        self.topology = Topology(run, streams or StreamsConfig())
        domain = None if self.secured else domain  # the access leads to the streams, wherever they are
        self.js = JetStream(client, domain=domain)
        self.js_api = "$JS.API" if domain is None else f"$JS.{domain}.API"
        """Prefix of the subjects on which JetStream hears requests."""
        self.not_storing: set[str] = set()
        """Streams that do not store what this process publishes although the server answers."""
        self.slower = 1.0
        """Factor by which this process reports less often than in a small run (`reporting_rate.py`)."""
        self._stop = stop
        self._notices_lost = LogThrottle(SAY_LOST_S)
        self._keys = KeyBucket(self.js, self.topology, signatures)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, config: BusConfig, run: str, *, name: str, stop: asyncio.Event | None = None,
        state: ProcessState | None = None, seen: Path | None = None,
    ) -> AsyncIterator[Self]:  # fmt: skip
        """Connect as `name`. Leaving the context sends what is still buffered.

        On a secured bus the file `seen` keeps which versions of signed records were taken, over a restart.

        Once `stop` is set, what waits for a bus that is away soon ends. Raises `BusAwayError` when nobody
        answers within `connect_timeout_s`, and `ConfigError` when the server refuses or the credentials are
        not for `run`, or no run can have that name."""
        Topology(run)  # a name that cannot be one is refused before anybody is waited for
        credentials = load_credentials(config.creds) if config.creds is not None else None
        if credentials is not None and credentials.run != run:
            raise ConfigError(
                f"{config.creds} is for run {credentials.run!r}, not for {run!r}: name that one"
            )
        signatures = None
        if credentials is not None and config.creds is not None:
            from bus.security.signatures import Signatures

            signatures = Signatures(credentials, config.creds, seen)
        newest_seed = signatures.renewed_seed if signatures is not None else None
        client = await connected(config, name, credentials, newest_seed)
        try:
            if credentials is not None:
                await refuse_other_layout(client, run, config.connect_timeout_s)
            bus = cls(
                client,
                run,
                streams=config.streams,
                patience_s=config.patience_s,
                stop=stop,
                domain=config.domain,
                signatures=signatures,
                state=state,
            )
            async with bus._keys.follows_role_keys():
                yield bus
        finally:
            await drain(client)

    @property
    def secured(self) -> bool:
        """Return whether the bus lets in only who has credentials, and is reached over TLS."""
        return self.signatures is not None

    def subject(self, *tokens: object) -> str:
        return self.topology.subject(*tokens)

    @property
    def longest_outage_s(self) -> float:
        """Seconds for which this process waits for a bus that is away: few once it was told to stop."""
        return longest_outage_s(self.patience_s, self._stop)

    async def patiently(self, ask: Callable[[], Awaitable[T]], what: str) -> T:
        """Return what `ask` does as soon as the bus is there (`bus.waiting.until_answered`)."""
        return await until_answered(
            ask, what, patience_s=self.patience_s, is_there=lambda: self.client.is_connected, stop=self._stop
        )

    # --- requests and answers ---

    async def request(self, subject: str, message: Message, *expected: type[R], timeout_s: float) -> R:
        """Send a request to the process that serves `subject`, and return its answer.

        Raises `BusError` when nobody answers in time or the answer is a refusal, and the error that the
        refusal names, if it names one (`Refused.code`)."""
        self._refuse_broken(subject)
        try:
            raw = await self.client.request(subject, self.sealed(subject, message), timeout=timeout_s)
        except nats.errors.NoRespondersError as error:
            raise BusError(nobody_serves(subject)) from error
        except nats.errors.Error as error:
            raise BusError(f"no answer from {subject} within {timeout_s:g} s ({error})") from error
        answer: Message = read_answer(subject, raw.data, *expected, Refused)
        if isinstance(answer, Refused):
            raise answer.error(subject)
        return cast(R, answer)

    def sealed(self, subject: str, message: Message) -> bytes:
        """Return a message as it travels on a subject of the run: signed, where a record of the run does."""
        return self._keys.sealed(self._record(subject), encode(message))

    async def opened(self, subject: str, data: bytes) -> bytes:
        """Return the message that came on a subject of the run, without its signature. Raises `UnsignedError`
        for a record that nobody who may write it has signed, or that is an old one."""
        return await self._keys.opened(self._record(subject), data)

    def _record(self, subject: str) -> str | None:
        return record_of(subject.removeprefix(f"{self.subject()}."))

    async def request_many(
        self, subject: str, message: Message, expected: type[R], *, timeout_s: float
    ) -> list[R]:
        """Send a request whose answer is several messages and a `Done`, at most `timeout_s` apart. Raises
        `BusError` as `request` does, and when a part of the answer was lost on the way."""
        self._refuse_broken(subject)
        inbox = self.client.new_inbox()
        answers: list[R] = []
        replies = await self.client.subscribe(
            inbox, pending_bytes_limit=0
        )  # 0 means no limit: no message may be dropped, and all are kept anyway
        try:
            await self.client.publish(subject, self.sealed(subject, message), reply=inbox)
            kinds = expected, Done, Refused
            async for answer in receive_answer(self.client, replies, subject, *kinds, timeout_s=timeout_s):
                if isinstance(answer, Refused):
                    raise answer.error(subject)
                if isinstance(answer, Done):
                    break
                answers.append(cast(R, answer))
        except nats.errors.Error as error:
            raise BusError(f"no answer from {subject} within {timeout_s:g} s ({error})") from error
        finally:
            await replies.unsubscribe()
        return answers

    def _refuse_broken(self, subject: str) -> None:
        """Raise `BusAwayError` while there is no connection: a request would be sent when nobody waits."""
        if not self.client.is_connected:
            raise BusAwayError(f"{subject}: the bus is away")

    async def serve(
        self, subject: str, expected: type[M], handle: Callable[[M], Awaitable[list[Message]]]
    ) -> Subscription:
        """Answer requests on `subject` with the messages that `handle` returns, several at a time.

        An exception of `handle` is answered as a refusal; one that is no `SluiceError` is logged in full.
        What asks for its answer elsewhere than in an inbox, or comes from a stream, is not handled."""
        running: set[asyncio.Task[None]] = set()

        async def answer(raw: Msg) -> None:
            try:
                data = await self.opened(raw.subject, raw.data)
                answers = await handle(_read_request(raw.subject, data, expected))
            except SluiceError as error:
                answers = [Refused.of_error(error)]
            except Exception as error:  # the task is nobody's child: an exception would be lost
                log.exception("request_failed", subject=subject)
                answers = [Refused(reason=f"{type(error).__name__}: {error}")]
            await self._reply(raw, answers)

        async def on_request(raw: Msg) -> None:  # a task each: long polls must not delay others
            if not (is_inbox(raw.reply) and self._is_from_a_process(raw)):
                self._refuse(raw)
                return
            task = asyncio.create_task(answer(raw), name=f"serve {subject}")
            running.add(task)
            task.add_done_callback(running.discard)

        return await self.client.subscribe(subject, cb=on_request)

    async def _reply(self, raw: Msg, answers: list[Message]) -> None:
        try:
            if not self.client.is_connected:
                raise BusAwayError("the bus is away")
            if len(answers) == 1:  # `request` takes a single message, and acknowledges nothing
                await self.client.publish(raw.reply, self._single(answers[0]), headers={PART: "0"})
            else:
                await send_answer(self.client, raw.reply, answers)
        except (nats.errors.Error, BusError) as error:  # the asker asks again
            log.warning("answer_not_sent", subject=raw.subject, reason=str(error))

    def _is_from_a_process(self, raw: Msg) -> bool:
        """Return whether no stream sent a request or notice of a secured bus.

        A role may have JetStream answer wherever processes listen, with what it has stored itself. Such an
        answer has headers, and our requests and notices have none there."""
        return not (self.secured and raw.headers)

    def _refuse(self, raw: Msg) -> None:
        self.state.messages_refused += 1
        log.warning(
            "message_refused", subject=raw.subject, reply=raw.reply, headers=sorted(raw.headers or ())
        )

    def _single(self, answer: Message) -> bytes:
        data, limit = encode(answer), self.client.max_payload
        if len(data) + HEADER_BYTES <= limit:
            return data
        return encode(Refused(reason=f"an answer of {len(data)} bytes exceeds max_payload {limit}"))

    async def notify(self, subject: str, message: Message) -> None:
        """Send a notice to the processes that listen now; none is stored, and none waits for the bus.

        A notice that a living connection does not take, such as one that is too large, is logged."""
        if not self.client.is_connected:
            return
        try:
            await self.client.publish(subject, self.sealed(subject, message))
        except BROKEN:  # just now: nobody listens
            return
        except nats.errors.Error as error:
            if times := self._notices_lost.due(time.monotonic()):
                reason = str(error) or type(error).__name__
                log.warning("notice_not_sent", subject=subject, reason=reason, times=times)

    async def listen(self, subject: str, expected: type[M], handle: Callable[[M], None]) -> Subscription:
        """Call `handle` on each notice. One that does not decode, or comes from a stream, is logged and
        skipped."""

        async def on_notice(raw: Msg) -> None:
            if (raw.reply and not is_inbox(raw.reply)) or not self._is_from_a_process(raw):
                self._refuse(raw)
                return
            try:
                handle(decode(await self.opened(raw.subject, raw.data), expected))
            except UnsignedError:  # `opened` has counted and logged this
                return
            except SchemaError as error:
                log.warning("notice_not_understood", subject=raw.subject, reason=str(error))

        return await self.client.subscribe(subject, cb=on_notice)

    # --- keys ---

    async def create_keys(self) -> None:
        """Create the run's key-value bucket if it does not exist. What an operator has set of it stays."""
        await self._keys.create()

    async def get(self, key: str, expected: type[R]) -> tuple[R, int] | None:
        """Return the message under `key` and its revision, or None. A record that nobody who may write it has
        signed is none: its owner writes it again."""
        return await self.patiently(lambda: self._get(key, expected), f"reading {key!r}")

    async def get_settled(self, key: str, expected: type[R]) -> tuple[R, int] | None:
        """Do what `get` does, but wait a moment for the owner of a record that was set aside."""
        deadline = time.monotonic() + OWNER_S
        while True:
            entry = await self.patiently(lambda: self._keys.read(key), f"reading {key!r}")
            if not entry.set_aside or time.monotonic() > deadline:
                return _message(key, entry, expected)
            await asyncio.sleep(RETRY_S)

    async def get_written(self, key: str, expected: type[R]) -> tuple[R, float] | None:
        """Return the message under `key` and when it was stored by the server's clock, or None."""
        entry = await self.patiently(lambda: self._keys.read(key), f"reading {key!r}")
        found = _message(key, entry, expected)
        return None if found is None else (found[0], entry.written_s)

    async def _get(self, key: str, expected: type[R]) -> tuple[R, int] | None:
        return _message(key, await self._keys.read(key), expected)

    async def put(self, key: str, message: Message) -> None:
        data = encode(message)
        await self.patiently(lambda: self._keys.write(key, data), f"writing {key!r}")

    async def swap(self, key: str, message: Message, revision: int) -> int | None:
        """Set `key` if it still has `revision` (0: is absent). Return the new revision, or else None. Raises
        `BusError` while the bus is away: the key may have been set or not."""
        return await self._keys.swap(key, encode(message), revision)

    async def holds(self, key: str, message: Message) -> bool:
        entry = await self.patiently(lambda: self._keys.read(key), f"reading {key!r}")
        return entry.content == encode(message)

    async def look_at_role_keys(self) -> None:
        """Take over the newest list of the roles' keys, or put it on the bus. Raises `BusError` where the run
        has no keys yet, or the bus is away."""
        await self._keys.look_at_role_keys()

    async def keys(self, prefix: str) -> list[str]:
        """List the keys that begin with `prefix` and a dot; removed ones may be among them."""
        return await self.patiently(lambda: self._keys.names(prefix), f"listing the keys {prefix!r}")

    async def delete(self, key: str) -> None:
        await self.patiently(lambda: self._keys.remove(key), f"deleting {key!r}")

    async def wait_for(self, key: str, expected: type[R], *, timeout_s: float, hint: str) -> R:
        """Wait for the message under `key`; `hint` is a question about who writes it, which is logged after a
        while. Raises `BusAwayError` with `hint` after `timeout_s`.

        A stream without a leader never answers a request, so the request is repeated."""
        began = time.monotonic()
        deadline, say_at = began + timeout_s, began + SAY_AFTER_S
        while True:
            if time.monotonic() > say_at:
                say_at += REMIND_S
                waited_s = round(time.monotonic() - began)
                log.warning("waiting_for_key", run=self.topology.run, key=key, hint=hint, waited_s=waited_s)
            try:
                found = await self._get(key, expected)
            except BusError as error:
                if not is_away(error) or time.monotonic() > deadline:
                    raise
            else:
                if found is not None:
                    return found[0]
                if time.monotonic() > deadline:
                    run = self.topology.run
                    raise BusAwayError(f"run {run!r}: waited {round(timeout_s, 1):g} s for {key!r}: {hint}")
            await asyncio.sleep(RETRY_S)


def _message(key: str, entry: Entry, expected: type[R]) -> tuple[R, int] | None:
    if entry.content is None:
        return None
    return read_answer(f"key {key!r}", entry.content, expected), entry.revision


def _read_request(subject: str, data: bytes, expected: type[M]) -> M:
    """Decode a request. Raises `GarbledRequestError`, which lets the asker ask again."""
    try:
        return decode(data, expected)
    except SchemaError as error:
        if error.kind == OTHER_BUILD:
            raise
        log.warning("request_garbled", subject=subject, reason=str(error))
        raise GarbledRequestError(str(error)) from error
