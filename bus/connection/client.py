"""nats-py's client, whose requests always end, and which connects anew where nobody seems to hear them."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import PERMISSIONS_ERR

from bus.security.stream_access import StreamAccess

log = structlog.get_logger()
SEND_S = 5.0
"""Longest time that a request may wait to be sent, beyond its time limit: nats-py itself sets no limit."""
SILENT_S = 60.0
"""Seconds without any answer to requests on a subject that others serve, after which to connect anew."""
LONGEST_SILENCE_S = 960.0
"""The same after connecting anew has not helped several times: the limit doubles each time."""
MOST_SUBJECTS = 1000
"""Subjects without an answer that are remembered."""
UNREADABLE = "Sluice-Unreadable-Headers"
"""Header of a message whose own headers cannot be read: it had some, which tells it from one without."""


class _RandomNames:
    """Names of inboxes. nats-py's own follow each other: who knows one could write to the others."""

    def next(self) -> bytearray:
        """Return a name that cannot be guessed."""
        return bytearray(secrets.token_hex(11).encode())


class BusClient(Client):  # type: ignore[misc]  # nats-py has no types
    """A client that reconnects by itself, also when the connection lives and requests are never answered.

    A server of a cluster may lose track of who listens behind another one, and a client of what it has
    subscribed to. Either shows in nothing but requests that time out, and a new connection mends it."""

    def __init__(
        self, newest_seed: Callable[[], str] | None = None, access: StreamAccess | None = None
    ) -> None:
        """Connect each time with the secret key that `newest_seed` returns, where it is given, and reach
        JetStream by `access` on a secured bus."""
        super().__init__()
        self._newest_seed = newest_seed
        self._access = access
        self._nuid = _RandomNames()
        self.refusal = ""
        """The server's latest complaint that this client may not do something."""
        self._silent_since: dict[str, float] = {}
        """When the first request of those that got no answer was sent, by subject."""
        self._silent_s = SILENT_S

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish a message; what JetStream hears goes there by the access of this role."""
        access = self._access
        if access is None or not access.is_stored(subject):
            await super().publish(subject, payload, reply=reply, headers=headers)
            return
        if subject.startswith(access.heard):
            await super().publish(subject, payload)  # nobody can listen where streams do
        await super().publish(access.prefix + subject, payload, reply, access.own_headers(headers))

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """Read the headers of a message. Those that cannot be read are not as if there were none."""
        found: dict[str, str] | None = await super()._process_headers(headers)
        return found or ({UNREADABLE: ""} if headers else None)

    async def request(
        self, subject: str, payload: bytes = b"", timeout: float = 0.5,
        old_style: bool = False, headers: dict[str, Any] | None = None,
    ) -> Msg:  # fmt: skip
        """Send a request and return its answer.

        Raises `nats.errors.TimeoutError` when there is none in time, and `NoRespondersError` when nobody
        serves the subject."""
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout + SEND_S):
                answer = await super().request(subject, payload, timeout, old_style, headers)
        except nats.errors.NoRespondersError:
            self._heard(subject)
            raise
        except TimeoutError as error:  # also nats-py's own
            await self._miss(subject, sent_s)
            raise nats.errors.TimeoutError from error
        self._heard(subject)
        return answer

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """Send a ping behind all that waits to be written. nats-py's own overtakes it, so that `flush` might
        end before the server knows of a subscription made before it."""
        if self.is_connected and self._pending:
            self._transport.writelines(self._pending[:])
            self._pending.clear()
            self._pending_data_size = 0
        await super()._send_ping(future)

    async def _process_pong(self) -> None:
        """Take the answer to a ping. That of a `flush` that was cancelled would end nats-py's read loop, and
        nothing would be read until the connection counts as broken."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_connect_init(self) -> None:
        """Greet the server. After a greeting that was garbled on the way nats-py tries again only if that
        raises one of its errors, and never closes the socket."""
        greeted = False
        if self._newest_seed is not None:
            self._nkeys_seed_str = self._newest_seed()
            self._setup_nkeys_seed_connect()
        try:
            await super()._process_connect_init()
            greeted = True
        except OSError:  # an unknown certificate is a ValueError, too
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise nats.errors.Error(f"nats: the greeting cannot be read: {error!r}") from error
        finally:
            if not greeted and self._transport is not None:
                self._transport.close()

    async def _process_err(self, err_msg: str) -> None:
        """Connect anew after a complaint of the server, such as of bytes that were garbled on the way.

        nats-py would close the connection for good, and the process would wait for the bus for ever."""
        if self._access is not None:
            err_msg = err_msg.replace(self._access.prefix, "")  # a secret, which no log may show
        if PERMISSIONS_ERR in err_msg:
            self.refusal = err_msg
        if PERMISSIONS_ERR in err_msg or not self.is_connected:
            await super()._process_err(err_msg)
            return
        complaint = nats.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        await self._error_cb(complaint)
        await self._process_op_err(complaint)

    def _heard(self, subject: str) -> None:
        if self._silent_since.pop(subject, None) is not None:
            self._silent_s = SILENT_S

    async def _miss(self, subject: str, sent_s: float) -> None:
        """Note that a request got no answer, and connect anew where that has gone on for long."""
        if len(self._silent_since) >= MOST_SUBJECTS:
            self._silent_since.clear()
        silent_s = time.monotonic() - self._silent_since.setdefault(subject, sent_s)
        if silent_s < self._silent_s or not self.is_connected:
            return
        log.warning("bus_connected_anew", subject=subject, no_answer_s=round(silent_s))
        self._silent_since.clear()
        self._silent_s = min(2 * self._silent_s, LONGEST_SILENCE_S)
        await self.force_reconnect()
