"""Moves messages that do not decode, or must not be acted on, to the stream DEAD with their reason."""

from collections.abc import Sequence

import nats.errors
import structlog
from nats.aio.msg import Msg

from bus.codec import encode
from bus.connection import Bus
from bus.errors import BusError
from bus.messages import DeadLetter
from bus.security.stream_access import MESSAGE_ID

log = structlog.get_logger()
REASON_CHARS = 1000
ACTOR_CHARS = 100


async def set_aside(
    raws: Sequence[Msg], data: bytes, bus: Bus, reason: str, *, kind: str = "unreadable", actor: str = ""
) -> None:
    """Move a message, one part or all parts of it, to DEAD as one letter. No retry would help.

    `kind` is the last token of the letter's subject, by which the server counts them. Raises `BusError` when
    the bus does not take the letter: then the message stays where it is."""
    first = raws[0]
    log.warning("message_set_aside", subject=first.subject, kind=kind, actor=actor, reason=reason)
    sequence = str(first.metadata.sequence.stream)
    overhead = (
        len(first.subject) + 4 * (REASON_CHARS + ACTOR_CHARS) + 4096
    )  # room for the rest of the letter and its headers
    letter = DeadLetter(
        subject=first.subject,
        reason=reason[:REASON_CHARS],
        data=data[: bus.client.max_payload - overhead],
        origin=sequence,
        kind=kind,
        actor=actor[:ACTOR_CHARS],
    )
    message_id = f"{first.metadata.stream}-{sequence}"

    async def move() -> None:
        headers = {MESSAGE_ID: message_id}
        try:
            await bus.js.publish(bus.subject("dead", kind), encode(letter), headers=headers)
            for raw in raws:
                await raw.term()
        except nats.errors.Error as error:
            raise BusError(f"cannot set {message_id} aside: {error}") from error

    await bus.patiently(move, f"setting {message_id} aside")
