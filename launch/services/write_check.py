"""Checks that a nats-server still stores messages. After one failed write, as on a full disk, nats-server
does not write a stream's file until it is restarted: publishing to that stream fails although the disk has
space again."""

import asyncio
import json
from contextlib import suppress
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.client import JetStreamContext

from bus.connection.client import authentication
from bus.security.credentials import Credentials

log = structlog.get_logger()
STREAM = "SLUICE-PROBE"
SUBJECT = "sluice-probe"
PERIOD_S = 0.5
ANSWER_S = 2.0
FAILURES = 3
"""Failed writes in a row, by a server that answers otherwise, after which it is given up."""


async def until_it_cannot_store(url: str, credentials: Credentials | None = None) -> str:
    """Write to a stream of its own for ever; return the reason once writing keeps failing."""
    client = await _connected(url, credentials)
    try:
        js = client.jetstream(timeout=ANSWER_S)
        failed, reason = 0, ""
        while failed < FAILURES:
            try:
                await _write(js)
                failed = 0
            except nats.errors.Error as error:
                reason = str(error) or type(error).__name__
                answers = await _answers(
                    js
                )  # a silent server is slow, suspended or away: no reason to end it
                failed = failed + 1 if answers else 0
                log.debug("probe_failed", reason=reason, server_answers=answers)
            await asyncio.sleep(PERIOD_S)
        return reason
    finally:
        with suppress(OSError, RuntimeError):  # uvloop raises it for a transport that the server closed
            await client.close()


async def until_a_stream_breaks(http_url: str) -> str:
    """Ask the server of its health for ever; return the reason once a stream is not well any more. Where
    streams are not well from the start on there is none: to start the server again would mend nothing."""
    failed, was_well = 0, False
    while True:
        problems = await asyncio.to_thread(_broken_streams, http_url)
        was_well = was_well or problems == []
        failed = failed + 1 if problems and was_well else 0
        if problems and failed == FAILURES:
            return problems[0]
        await asyncio.sleep(PERIOD_S)


def _broken_streams(http_url: str) -> list[str] | None:
    """Return what the server says of streams that are not well; None while it says nothing."""
    try:
        with urlopen(f"{http_url}/healthz?details=true", timeout=ANSWER_S):
            return []
    except HTTPError as error:  # the server tells of what is wrong in this way
        with error:
            told = json.load(error)
        return [each["error"] for each in told["errors"] if each["type"] == "STREAM"]
    except (OSError, HTTPException) as error:
        log.debug("server_tells_no_health", reason=str(error) or type(error).__name__)
        return None


async def _connected(url: str, credentials: Credentials | None) -> Client:
    while True:
        client = Client()
        try:
            await client.connect(
                url,
                name="probe",
                error_cb=_note,  # nats-py would print a traceback with every attempt
                max_reconnect_attempts=-1,
                reconnect_time_wait=PERIOD_S,
                **authentication(credentials),
            )
        except (OSError, nats.errors.Error) as error:  # the supervisor of the server restarts it
            log.debug("probe_not_connected", reason=str(error))
            await asyncio.sleep(PERIOD_S)
        else:
            return client


async def _note(error: Exception) -> None:
    log.debug("probe_connection", reason=str(error) or type(error).__name__)


async def _answers(js: JetStreamContext) -> bool:
    try:
        await js.account_info()
    except nats.errors.Error:
        return False
    return True


async def _write(js: JetStreamContext) -> None:
    try:
        await js.publish(SUBJECT, b"")
    except nats.js.errors.NoStreamResponseError:  # at the first time, or after the directory was wiped
        await js.add_stream(StreamConfig(name=STREAM, subjects=[SUBJECT], max_msgs=1, storage="file"))
