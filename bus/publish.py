"""Publishing to a stream so that every message is stored exactly once.

nats-py's `publish_async` never resolves on a rejection or a disconnect, so this keeps its own reply inbox,
sends each message under a `Nats-Msg-Id`, and sends it again until the server has acknowledged it.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.msg import Msg

from bus.connection import HEADER_BYTES, Bus
from bus.errors import BusError

log = structlog.get_logger()
ACK_TIMEOUT_S = 2.0
LONGEST_PAUSE_S = 0.5
STREAM_FULL = frozenset({10077, 10047, 10023})
"""err_codes with which `discard: new` and resource limits answer: wait, space returns as others ack."""


@dataclass
class PublishCounts:
    """What the server answered so far."""

    stored: int = 0
    duplicates: int = 0
    retries: int = 0
    refused_full: int = 0


class Publisher:
    """Pipelined, deduplicated publishing over one connection; `window` messages await their ack at a time."""

    def __init__(self, bus: Bus, *, window: int = 256) -> None:
        self.counts = PublishCounts()
        self._bus = bus
        self._slots = asyncio.Semaphore(window)
        self._inbox = bus.client.new_inbox()
        self._awaited: dict[str, asyncio.Future[dict[str, object]]] = {}
        self._tokens = itertools.count()
        self._subscribed = False

    async def publish(self, subject: str, data: bytes, *, message_id: str, timeout_s: float = 600.0) -> None:
        """Return once the stream has stored `data`, however often that takes.

        Raises `BusError` when the message is larger than the server takes, when the server refuses it for a
        reason that waiting cannot mend, or after `timeout_s`.
        """
        limit = self._bus.client.max_payload  # for data and headers: a server closes the connection above it
        if len(data) + HEADER_BYTES + len(message_id.encode()) > limit:
            raise BusError(
                f"{subject}: {len(data)} bytes exceed the server's max_payload of {limit}: raise it"
            )
        deadline = time.monotonic() + timeout_s
        pause = 0.02
        async with self._slots:
            while not await self._stored(subject, data, message_id):
                if time.monotonic() > deadline:
                    raise BusError(f"{subject}: {message_id} was not stored within {timeout_s:g} s")
                self.counts.retries += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _stored(self, subject: str, data: bytes, message_id: str) -> bool:
        """Send once; True when the server says it has it."""
        if not self._subscribed:
            self._subscribed = True
            await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._on_ack)
        token = str(next(self._tokens))
        ack = self._awaited[token] = asyncio.get_running_loop().create_future()
        try:
            await self._bus.client.publish(
                subject, data, reply=f"{self._inbox}.{token}", headers={"Nats-Msg-Id": message_id}
            )
            answer = await asyncio.wait_for(ack, ACK_TIMEOUT_S)
        except (TimeoutError, nats.errors.Error) as error:
            log.debug("publish_retry", subject=subject, reason=str(error) or "no ack")
            return False
        finally:
            self._awaited.pop(token, None)
        return self._accepted(subject, answer)

    def _accepted(self, subject: str, answer: dict[str, object]) -> bool:
        error = answer.get("error")
        if not isinstance(error, dict):
            self.counts.duplicates += bool(answer.get("duplicate"))
            self.counts.stored += not answer.get("duplicate")
            return True
        if error.get("err_code") in STREAM_FULL:
            self.counts.refused_full += 1
        elif error.get("code") != 503:  # 503: no leader or no stream yet
            raise BusError(f"{subject}: the stream refuses: {error.get('description')}")
        return False

    async def _on_ack(self, raw: Msg) -> None:
        ack = self._awaited.get(raw.subject.rsplit(".", 1)[1])
        if ack is None or ack.done():
            return
        if raw.headers and raw.headers.get("Status") == "503":
            ack.set_result({"error": {"code": 503}})
        else:
            ack.set_result(json.loads(raw.data))
