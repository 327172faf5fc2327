"""An actor's counters on the run's record."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from itertools import count

import structlog

from actors.weights.first_policy import actor_name
from bus.codec import Json, encode
from bus.connection import Bus
from bus.connection.status import Activity, report_status
from bus.errors import BusError
from bus.messages import Metrics
from bus.security.permissions import COUNTERS
from bus.streams.publish import Publisher
from bus.waiting import set_within
from storage.metrics.records import ENDED

log = structlog.get_logger()
PERIOD_S = 1.0
REPEAT_S = 120.0
"""Seconds until counters that stay as they are come again, in a run of many actors."""
PUBLISH_TIMEOUT_S = 10.0


async def report_actor(
    bus: Bus, look: Callable[[], Activity], stop: asyncio.Event, *, waits_for: Callable[[], str] = str
) -> None:
    """Send what `look` returns until `stop`, as `report_status` does, as the status of this actor process."""
    source = actor_name()
    await report_status(bus, source=source, role="actor", look=look, stop=stop, waits_for=waits_for)


async def report_metrics(
    bus: Bus, *, source: str, look: Callable[[], tuple[int, Mapping[str, Json]]], stop: asyncio.Event
) -> None:
    """Publish the step and numbers of `look` until `stop`. What the bus does not take is left out. In a run
    of many actors they come less often, and those that stay as they are once in `REPEAT_S`."""
    publisher, token = Publisher(bus), secrets.token_hex(4)
    sent: tuple[int, Mapping[str, Json]] | None = None
    sent_s = 0.0
    bus.state.metrics = look()[1]  # whoever asks in the first second is told too
    for number in count():
        # twice as rare as status, since each is stored and answered
        if await set_within(stop, PERIOD_S * max(1.0, 2 * (bus.slower - 1))):
            return
        step, values = look()
        bus.state.metrics = values
        if bus.slower > 1 and (step, values) == sent and time.monotonic() - sent_s < REPEAT_S:
            continue
        sent, sent_s = (step, values), time.monotonic()
        await _publish(publisher, bus, source, step, values, message_id=f"metrics-{token}-{number}")


async def report_end(
    bus: Bus, *, source: str, look: Callable[[], tuple[int, Mapping[str, Json]]], reason: str
) -> None:
    """Publish the last numbers of a process that ends for `reason`, which no restart mends."""
    step, values = look()
    ended = {**values, ENDED: reason}
    await _publish(Publisher(bus), bus, source, step, ended, message_id=f"ended-{secrets.token_hex(8)}")


async def _publish(
    publisher: Publisher, bus: Bus, source: str, step: int, values: Mapping[str, Json], *, message_id: str
) -> None:
    metrics = Metrics(source=source, step=step, time_s=time.time(), values=dict(values))
    try:
        await publisher.publish(
            bus.subject(COUNTERS), encode(metrics), message_id=message_id, timeout_s=PUBLISH_TIMEOUT_S
        )
    except BusError as error:  # the next sums say it too, and why an actor ended is on its own screen
        log.warning("metrics_not_published", reason=str(error))
