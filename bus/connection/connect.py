"""Opens a client's connection to the bus, says why it cannot, and closes it."""

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client

from bus.config import BusConfig, without_credentials
from bus.connection.client import BusClient
from bus.errors import BusAwayError, ConfigError
from bus.security.credentials import BUS_NAME, Credentials
from bus.security.permissions import inbox_prefix
from bus.security.stream_access import StreamAccess
from bus.topology import Topology
from bus.waiting import RETRY_S, cancelled

log = structlog.get_logger()
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


async def connected(
    config: BusConfig, name: str, credentials: Credentials | None,
    newest_seed: Callable[[], str] | None = None,
) -> BusClient:  # fmt: skip
    """Return a connected client, which from then on reconnects for ever, with the key of `newest_seed`."""
    client = BusClient(newest_seed, StreamAccess.of(credentials) if credentials is not None else None)
    began, starting, complaint, is_ready = time.monotonic(), True, "", False

    async def on_error(error: Exception) -> None:  # with every attempt: log each new reason once
        nonlocal complaint
        reason = str(error) or type(error).__name__
        if reason != complaint:
            complaint = reason
            log.warning("bus_error", error=reason)
        if starting and "authorization" in reason.lower():
            raise ConfigError(reason)  # waiting does not mend wrong credentials
        if starting and (mistake := await _tls_mistake(client, reason, credentials)):
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
        await asyncio.wait({connecting}, timeout=config.connect_timeout_s)
        if not connecting.done():
            raise TimeoutError
        await connecting
        is_ready = True
    except (OSError, ValueError, nats.errors.Error) as error:  # TimeoutError is an OSError
        silence = "no answer" if credentials else "no answer: a bus with keys needs --creds"
        reason = complaint or str(error) or silence
        parses = bool(client.options)
        refused = not parses or isinstance(error, ConfigError) or "authorization" in reason.lower()
        raise (ConfigError if refused else BusAwayError)(
            _unusable(config, reason, tried_s=time.monotonic() - began)
        ) from error
    finally:
        starting = False
        await cancelled(connecting)  # to cancel it once is not enough: it would go on for ever
        # It may connect although it was cancelled, and nobody else would close it then. Without options the
        # URL did not parse.
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
        else:
            return


def _unusable(config: BusConfig, reason: str, *, tried_s: float) -> str:
    return (
        f"cannot use the bus at {without_credentials(config.url)} ({reason}, tried for {tried_s:.1f} s): "
        "start one with `launch bus`, or name another with --bus.url"
    )


async def _tls_mistake(client: Client, reason: str, credentials: Credentials | None) -> str:
    """Return what is wrong where server and client do not agree on TLS, which waiting does not mend."""
    if credentials is not None:
        if "WRONG_VERSION_NUMBER" in reason:
            return "it speaks no TLS, and credentials are for a bus that does"
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return "its certificate is not of the authority in the credentials: it is another bus"
    elif "INFO" in reason and await _begins_with_tls(client):  # a bus without keys speaks first
        return "a bus with keys needs --creds"
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
