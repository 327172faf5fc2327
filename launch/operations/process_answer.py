"""What a process of a run answers to a command, which may take minutes."""

from dataclasses import dataclass
from typing import TypeVar

from nats.errors import NoRespondersError

from bus.codec import Message
from bus.connection.bus import Bus
from bus.errors import BusAwayError, BusError, ConfigError
from bus.waiting import told_if_slow

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Asked:
    """Who is asked, and what may be said of it."""

    who: str
    """The process, such as `storage`."""
    refused: str
    """What a refusal means, as the beginning of a sentence."""
    unknown: str
    """What is not known where no answer came, and where to look, as a sentence."""


async def answer_of(
    bus: Bus, subject: str, request: Message, expected: type[R], asked: Asked, *, timeout_s: float
) -> R:
    """Return the answer. Raises `ConfigError` with the reason of a refusal, and `BusAwayError` where none
    came in time: the process has not heard the request, or may do it all the same."""
    run = bus.topology.run
    try:
        with told_if_slow("waiting_for_answer", who=asked.who, run=run, longest_s=timeout_s):
            return await bus.request(subject, request, expected, timeout_s=timeout_s)
    except BusError as error:
        if error.refusal:
            raise ConfigError(f"{asked.refused}: {error.refusal}") from error
        not_sent = isinstance(error, BusAwayError) or isinstance(error.__cause__, NoRespondersError)
        rest = "nothing was asked of it, try again" if not_sent else asked.unknown
        raise BusAwayError(f"{asked.who} of run {run!r}: {error}; {rest}") from error
