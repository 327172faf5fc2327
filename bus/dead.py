"""What cannot be understood moves to DEAD with its reason, and never comes back."""

from collections.abc import Sequence

import nats.errors
import structlog
from nats.aio.msg import Msg

from bus.codec import encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import DeadLetter

log = structlog.get_logger()
REASON_CHARS = 1000


async def set_aside(raws: Sequence[Msg], data: bytes, bus: Bus, reason: str) -> None:
    """Move a message, one or all parts of it, to DEAD as one letter. A retry cannot help it.

    Raises `BusError` when the bus does not take the letter: then the message stays where it is.
    """
    first = raws[0]
    log.warning("message_set_aside", subject=first.subject, reason=reason)
    sequence = str(first.metadata.sequence.stream)
    overhead = len(first.subject) + 4 * REASON_CHARS + 4096  # the rest of the letter and its headers
    letter = DeadLetter(
        subject=first.subject,
        reason=reason[:REASON_CHARS],
        data=data[: bus.client.max_payload - overhead],
        origin=sequence,
    )
    message_id = f"{first.metadata.stream}-{sequence}"
    try:
        await bus.js.publish(
            bus.subject("dead", "letter"), encode(letter), headers={"Nats-Msg-Id": message_id}
        )
        for raw in raws:
            await raw.term()
    except nats.errors.Error as error:
        raise BusError(f"cannot set {message_id} aside: {error}") from error
