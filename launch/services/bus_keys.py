"""Has a running bus follow its directory of credentials: who is let in, and which keys roles sign with."""

import asyncio
import time

import structlog

from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.errors import BusError, ConfigError, SluiceError
from bus.server.nats_server import NatsServer
from bus.server.secure_directory import SecureDirectory
from bus.waiting import set_within

log = structlog.get_logger()
LOOK_S = 0.5
TELL_AGAIN_S = 10.0
"""Seconds until a run is told again that could not be told of its keys."""
CONNECT_S = 5.0
"""Longest wait for the server, as an operator of a run."""


async def follow_directory(server: NatsServer, keys: SecureDirectory, stop: asyncio.Event) -> None:
    """Have the server take over what changes in the directory, and tell runs of new keys, until `stop`.

    Connections by a key that was revoked end at once."""
    told: dict[str, int] = {}
    known, again_s = _lists(keys), 0.0
    while not stop.is_set():
        try:
            found = _lists(keys)
            if found != known:
                server.reload()
                known, again_s = found, 0.0
                log.info("keys_taken_over", runs=sorted(found))
        except (SluiceError, OSError) as error:  # a file is damaged or being replaced, or the bus restarts
            log.warning("keys_not_taken_over", reason=str(error))
        if time.monotonic() >= again_s:
            for run in sorted(run for run, revision in known.items() if told.get(run) != revision):
                if await _tell(server, keys, run):
                    told[run] = known[run]
            again_s = time.monotonic() + TELL_AGAIN_S
        await set_within(stop, LOOK_S)


def _lists(keys: SecureDirectory) -> dict[str, int]:
    """Return the revision of each run's list of keys."""
    return {run: keys.files(run).keys.revision for run in keys.runs}


async def _tell(server: NatsServer, keys: SecureDirectory, run: str) -> bool:
    """Put the list of a run's keys on the bus; return whether it is there. A run that has not begun has no
    place for it."""
    where = BusConfig(url=server.url, creds=keys.files(run).creds("operator"), connect_timeout_s=CONNECT_S)
    try:
        async with Bus.connect(where, run, name="keys") as bus:
            await bus.look_at_role_keys()
    except (BusError, ConfigError) as error:
        log.debug("keys_not_told", run=run, reason=str(error))
        return False
    return True
