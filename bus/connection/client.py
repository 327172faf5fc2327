"""A client's connection to the bus: opened, with a reason where that fails, and closed.

It is nats-py's client, whose requests always end, and which connects anew where nobody seems to hear them."""

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol.parser import PERMISSIONS_ERR

from bus.config import BusConfig, without_credentials
from bus.errors import LOGIN_REFUSED, BusAwayError, ConfigError, tells
from bus.security.credentials import BUS_NAME, Credentials
from bus.security.permissions import inbox_prefix
from bus.security.stream_access import StreamAccess
from bus.topology import Topology
from bus.waiting import RETRY_S, cancelled, told_if_slow

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
LINE_BYTES = 16
"""Room left for what begins and ends the headers of a message, which the server counts."""
PING_S = 5
"""Seconds between two signs of life of a connection."""
PINGS = 3
"""Signs of life without an answer after which a connection counts as broken."""
TLS_PROBE_S = 2.0
"""Longest time in which a server may answer the question whether it begins with TLS."""
DRAIN_S = 4
"""Longest time that the bus may take to answer for the subscriptions of a connection that ends."""
STREAMS_S = 2.0
"""Longest time that JetStream may take to answer a client that has just connected."""
CLOSE_S = 2.0
"""Longest time that closing a connection may take."""


class _RandomNames:
    """Names of inboxes. nats-py's own follow each other: who knows one could write to the others."""

    def next(self) -> bytearray:
        return bytearray(secrets.token_hex(11).encode())


class TooLargeError(nats.errors.MaxPayloadError):  # type: ignore[misc]  # nats-py has no types
    """A message has more bytes than the server takes."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__()
        self._told = f"{subject}: {size} bytes exceed the server's max_payload of {limit}: raise it"

    def __str__(self) -> str:
        return self._told


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
        """Publish a message; what JetStream hears goes there by the access of this role. Raises
        `TooLargeError` for one that the server would not take: it would end the connection."""
        access, there = self._access, subject
        if access is not None and access.is_stored(subject):
            there, headers = access.prefix + subject, access.own_headers(headers)
        size = len(payload)
        if headers:
            size += LINE_BYTES + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
        if size > self.max_payload:
            raise TooLargeError(subject, size, self.max_payload)
        if access is not None and there != subject and subject.startswith(access.heard):
            await super().publish(subject, payload)  # nobody can listen where streams do
        await super().publish(there, payload, reply, headers)

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


async def connected(
    config: BusConfig, name: str, credentials: Credentials | None,
    newest_seed: Callable[[], str] | None = None,
) -> BusClient:  # fmt: skip
    """Return a connected client, which from then on reconnects for ever, with the key of `newest_seed`."""
    client = BusClient(newest_seed, StreamAccess.of(credentials) if credentials is not None else None)
    began, starting, complaint, is_ready = time.monotonic(), True, "", False

    async def on_error(error: Exception) -> None:  # with every attempt: log each new reason once
        nonlocal complaint
        reason = str(error) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)
        if reason != complaint:
            complaint = reason
            log.warning("bus_error", error=reason)
        if starting and _is_refused(error):
            raise ConfigError(reason)  # waiting does not mend wrong credentials
        if starting and (mistake := await _tls_mistake(client, error, credentials)):
            complaint = mistake
            raise ConfigError(mistake)

    async def on_reconnect() -> None:
        nonlocal complaint
        complaint = ""
        log.info("bus_reconnected")

    connecting = asyncio.create_task(
        client.connect(
            config.url.split(","),
            name=name,
            error_cb=on_error,
            reconnected_cb=on_reconnect,
            **_patience(),
            **authentication(credentials),
        ),
        name="connect",
    )
    try:
        url, limit_s = without_credentials(config.url), config.connect_timeout_s
        with told_if_slow("waiting_for_the_bus", url=url, longest_s=limit_s):
            await asyncio.wait({connecting}, timeout=limit_s)
        if not connecting.done():
            raise TimeoutError
        await connecting
        is_ready = True
    except (OSError, ValueError, nats.errors.Error) as error:  # TimeoutError is an OSError
        silence = "no answer" if credentials else "no answer: a bus with keys needs --creds"
        reason = complaint or str(error) or silence
        parses = bool(client.options)
        refused = not parses or isinstance(error, ConfigError) or _is_refused(error)
        raise (ConfigError if refused else BusAwayError)(
            _unusable(config, reason, tried_s=time.monotonic() - began)
        ) from error
    finally:
        starting = False
        await cancelled(connecting)  # a connect that is cancelled once goes on
        # The client may connect although it was cancelled, and nobody else closes it then. Without options
        # the URL did not parse.
        if client.options and not (is_ready and client.is_connected):
            await close(client)
    return client


def _patience() -> dict[str, Any]:
    """Return the options by which a client reconnects for ever, and finds out that a connection is dead."""
    return {
        "max_reconnect_attempts": -1,
        "reconnect_time_wait": RETRY_S,
        "pending_size": 64 << 20,
        "drain_timeout": DRAIN_S,
        "ping_interval": PING_S,
        "max_outstanding_pings": PINGS,
    }


async def refuse_other_layout(client: BusClient, run: str, timeout_s: float) -> None:
    """Return if this role of a secured run reaches JetStream, or nobody answers for it now.

    Raises `ConfigError` where the bus lets the role in but not to JetStream by its access, as one that an
    older build has configured, and `BusAwayError` where no server with JetStream is reached."""
    deadline = time.monotonic() + timeout_s
    subject = f"$JS.API.STREAM.INFO.KV_{Topology(run).bucket}"
    remedy = "start it again by `launch bus --secure` of this build: streams and credentials stay"
    while True:
        try:
            await client.request(subject, timeout=STREAMS_S)
        except nats.errors.NoRespondersError:
            if time.monotonic() > deadline:
                raise BusAwayError(
                    f"the streams of run {run!r} are not reached over this bus: if an older build made its "
                    f"configuration, {remedy}"
                ) from None
            await asyncio.sleep(RETRY_S)
        except nats.errors.TimeoutError:  # perhaps JetStream has no leader: whoever asks for more waits
            if client.refusal:
                raise ConfigError(f"an older build made the configuration of this bus: {remedy}") from None
            return
        except nats.errors.Error as error:  # the server ends connections as it takes over other keys
            raise BusAwayError(f"the connection to the bus ended at its first request: {error}") from error
        else:
            return


def _unusable(config: BusConfig, reason: str, *, tried_s: float) -> str:
    return (
        f"cannot use the bus at {without_credentials(config.url)} ({reason}, tried for {tried_s:.1f} s): "
        "if none runs there, start one with `launch bus`, or name another with --bus.url"
    )


def _is_refused(error: Exception) -> bool:
    return isinstance(error, nats.errors.AuthorizationError) or tells(error, LOGIN_REFUSED)


async def _tls_mistake(client: Client, error: Exception, credentials: Credentials | None) -> str:
    """Return what is wrong where server and client do not agree on TLS, which waiting does not mend."""
    if credentials is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return "its certificate is not of the authority in the credentials: it is another bus"
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return "it speaks no TLS, and credentials are for a bus that does"
    elif type(error) is nats.errors.Error or isinstance(error, TimeoutError):  # the server is silent
        return "a bus with keys needs --creds" if await _begins_with_tls(client) else ""
    return ""


async def _begins_with_tls(client: Client) -> bool:
    """Return whether the server answers a TLS handshake. Nothing is sent after that."""
    url = client._current_server.uri if client._current_server is not None else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if url is None:
        return False
    try:
        async with asyncio.timeout(TLS_PROBE_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port, ssl=context)
    except OSError:  # ssl.SSLError and TimeoutError are among them
        return False
    writer.close()
    return True


def authentication(credentials: Credentials | None) -> dict[str, Any]:
    """Return the options of a client that is let in by these credentials; none without any."""
    if credentials is None:
        return {}
    return {
        "nkeys_seed_str": credentials.seed,
        "tls": credentials.tls(),
        "tls_hostname": BUS_NAME,
        "tls_handshake_first": True,
        "inbox_prefix": inbox_prefix(credentials.run, credentials.role),
    }


async def drain(client: Client) -> None:
    """Send what is buffered, then close. A bus that is gone must not delay the end of the process."""
    try:
        async with asyncio.timeout(DRAIN_S + CLOSE_S):
            await client.drain()
    except (OSError, nats.errors.Error) as error:  # TimeoutError is an OSError
        log.warning("bus_not_drained", error=str(error) or type(error).__name__)
        await close(client)
    finally:
        _close_socket(client)


async def close(client: Client) -> None:
    """Close the client, for `CLOSE_S` at most: after a TLS handshake that failed it would wait for ever."""
    try:
        with suppress(OSError, RuntimeError):  # TimeoutError is an OSError; uvloop raises the other one
            async with asyncio.timeout(CLOSE_S):
                await client.close()
    finally:
        _close_socket(client)


def _close_socket(client: Client) -> None:
    """Close what nats-py leaves open where its own closing is cancelled before the end."""
    if client._transport is not None:
        client._transport.close()
