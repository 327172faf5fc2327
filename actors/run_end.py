"""Tells an actor process when its work is over."""

import asyncio
from collections.abc import Callable

import structlog

from bus.errors import EngineLostError
from bus.waiting import RETRY_S, set_within

log = structlog.get_logger()


async def stop_when_done(stage: Callable[[], str], failure: Callable[[], str], stop: asyncio.Event) -> None:
    """Set `stop` when the run gets done; one that was done before this process came may be going on soon.
    Raises `EngineLostError` with the reason of a failure. `failure` tells why engines have stopped for good,
    and is empty as long as none has."""
    trained = False
    while not stop.is_set():
        if reason := failure():
            raise EngineLostError(reason)
        trained = trained or stage() in ("warmup", "rl")
        if trained and stage() == "done":
            log.info("run_is_done")
            stop.set()
        await set_within(stop, RETRY_S)
