"""A message from a stream, decoded, with its handle there, and the reports that keep it from others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import nats.errors
import structlog
from nats.aio.msg import Msg

from bus.codec import M, decode
from bus.connection import Bus
from bus.errors import SchemaError
from bus.streams.message_parts import Parts, StreamMessage
from bus.topology import ACK_WAIT_S

log = structlog.get_logger()


@dataclass(frozen=True)
class Received(Generic[M]):
    """A decoded message and its handle on the stream."""

    message: M
    handle: StreamMessage

    @property
    def deliveries(self) -> int:
        """Return the number of deliveries of the message, this one and those that came back unread
        included."""
        return int(self.handle.raws[0].metadata.num_delivered)

    async def ack(self) -> None:
        """Acknowledge the message, which the stream forgets. Raises `BusError` on a closed connection."""
        await self.handle.ack()

    async def hand_back(self) -> None:
        """Let the stream deliver it to another consumer at once."""
        try:
            for raw in self.handle.raws:
                await raw.nak()
        except nats.errors.Error as error:  # the bus is away: the ack wait gives it back
            log.warning("message_not_handed_back", subject=self.handle.subject, reason=str(error))


async def understood(
    arrived: list[Msg], bus: Bus, expected: type[M], parts: Parts | None = None
) -> list[Received[M]]:
    """Return the messages that `arrived` completes and that decode; the others are set aside, as are records
    that nobody who may write them has signed.

    Incomplete messages wait in `parts` for their other parts."""
    good: list[Received[M]] = []
    parts = parts or Parts(bus)
    for handle in await parts.collect(arrived):
        try:
            data = await bus.opened(handle.subject, handle.data)
            good.append(Received(decode(data, expected), handle))
        except SchemaError as error:
            await parts.refuse(handle, error)
    return good


async def while_reporting_progress(
    received: Received[M], handle: Callable[[Received[M]], Awaitable[None]]
) -> None:
    """Run `handle` on a message that is reported as in progress meanwhile."""
    beating = asyncio.create_task(report_progress(lambda: [received]))
    try:
        await handle(received)
    finally:
        beating.cancel()


async def report_progress(held: Callable[[], Sequence[Received[M]]]) -> None:
    """Report the held messages as in progress, so that the stream does not deliver them to others."""
    while True:
        await asyncio.sleep(ACK_WAIT_S / 3)
        for received in held():
            try:
                for raw in received.handle.raws:
                    await raw.in_progress()
            except nats.errors.MsgAlreadyAckdError:  # acked since the list was made
                continue
            except nats.errors.Error as error:  # the bus is away: try again later, the work goes on
                log.warning("progress_not_reported", subject=received.handle.subject, reason=str(error))
                break
