"""What a process knows of itself, for probes and Prometheus: its phase, its numbers, its connection."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from nats.aio.client import Client

from bus.codec import Json
from bus.waiting import cancelled

TURN_S = 1.0
"""Seconds between two signs of life of the event loop."""


class ProcessState:
    """Written by the event loop, read by any thread: each field is replaced whole and never changed."""

    def __init__(self, role: str = "", run: str = "") -> None:
        self.role = role
        self.run = run
        self.client: Client | None = None
        """Connection to the bus."""
        self.doing = "starting"
        self.waits_for = "its start"
        """What must happen before the process does its work; empty when it does."""
        self.values: Mapping[str, Json] = {}
        """Numbers of the latest status."""
        self.metrics: Mapping[str, Json] = {}
        """Numbers of the latest metrics: the learner's last step, an actor's counters."""
        self.messages_refused = 0
        """Requests and notices that came from a stream, or ask for an answer elsewhere than in an inbox."""
        self.revision = ""
        """Digest of the run's settings that the process works by."""
        self.following: asyncio.Task[None] | None = None
        """Compares the run's settings with those that the process works by, as long as it is connected."""
        self.settings_differ: tuple[str, ...] = ()
        """Settings that are others in the run by now, each with both values."""
        self._turned_s = time.monotonic()

    @property
    def connected(self) -> bool:
        """Return whether the bus answers; True for a process that needs none."""
        return self.client is None or self.client.is_connected

    @property
    def silent_s(self) -> float:
        """Return the seconds since the event loop turned last, less those that it may sleep."""
        return max(0.0, time.monotonic() - self._turned_s - TURN_S)

    def wait_for(self, what: str) -> None:
        """Note what the process waits for before it does its work."""
        self.waits_for = self.doing = what

    @asynccontextmanager
    async def turning(self) -> AsyncIterator[None]:
        """Note while inside that the event loop turns."""

        async def turn() -> None:
            while True:
                self._turned_s = time.monotonic()
                await asyncio.sleep(TURN_S)

        turns = asyncio.create_task(turn(), name="note that the event loop turns")
        try:
            yield
        finally:
            await cancelled(turns)
