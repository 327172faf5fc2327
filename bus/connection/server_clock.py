"""The clock of the bus beside that of this host."""

import json
import time
from dataclasses import dataclass
from datetime import datetime

import nats.errors

from bus.connection.bus import Bus
from bus.errors import BusError

NO_STREAM = 404


@dataclass(frozen=True)
class ServerClock:
    """What the time of an answer tells of the server's clock."""

    ahead_s: float
    """Seconds by which the server is ahead of this host's clock."""
    uncertain_s: float
    """Bound on the error of that: half of the time which the answer took."""


async def server_clock(bus: Bus, timeout_s: float) -> ServerClock | None:
    """Compare the clocks; None where the server has no such run, whose streams tell its time. Raises
    `BusError` where JetStream does not answer, or refuses."""
    subject = f"{bus.js_api}.STREAM.INFO.KV_{bus.topology.bucket}"
    begin = time.time()
    try:
        answer = json.loads((await bus.client.request(subject, b"", timeout=timeout_s)).data)
        end = time.time()
        if "error" not in answer:
            ahead_s = datetime.fromisoformat(answer["ts"]).timestamp() - (begin + end) / 2
            return ServerClock(ahead_s, (end - begin) / 2)
    except (TimeoutError, nats.errors.Error, ValueError, KeyError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise BusError(f"JetStream of the bus does not answer ({reason})") from error
    if answer["error"].get("code") != NO_STREAM:
        raise BusError(f"JetStream of the bus refuses: {answer['error'].get('description')}")
    return None
