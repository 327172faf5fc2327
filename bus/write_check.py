"""Does the server still store? Once a write has failed, as on a full disk, nats-server leaves a stream's file
alone until it is started again: publishing to that stream fails from then on, whatever room there is."""

import asyncio

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.client import JetStreamContext

log = structlog.get_logger()
STREAM = "SLUICE-PROBE"
SUBJECT = "sluice-probe"
PERIOD_S = 0.5
ANSWER_S = 2.0
FAILURES = 3
"""In a row, before the server is given up."""


async def until_it_cannot_store(url: str) -> str:
    """Write to a stream of its own for ever; returns why that fails, once it keeps failing."""
    client = await _connected(url)
    try:
        js = client.jetstream(timeout=ANSWER_S)
        failed, reason = 0, ""
        while failed < FAILURES:
            try:
                await _write(js)
                failed = 0
            except nats.errors.Error as error:
                failed, reason = failed + 1, str(error) or type(error).__name__
                log.debug("probe_failed", reason=reason)
            await asyncio.sleep(PERIOD_S)
        return reason
    finally:
        await client.close()


async def _connected(url: str) -> Client:
    while True:
        client = Client()
        try:
            await client.connect(url, name="probe", max_reconnect_attempts=-1, reconnect_time_wait=PERIOD_S)
        except (OSError, nats.errors.Error) as error:  # whoever started the server sees to it that it runs
            log.debug("probe_not_connected", reason=str(error))
            await asyncio.sleep(PERIOD_S)
        else:
            return client


async def _write(js: JetStreamContext) -> None:
    try:
        await js.publish(SUBJECT, b"")
    except nats.js.errors.NoStreamResponseError:  # the first time, or somebody wiped the directory
        await js.add_stream(StreamConfig(name=STREAM, subjects=[SUBJECT], max_msgs=1, storage="file"))
