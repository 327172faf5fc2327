"""What an actor waits for before it has a model: the learner's first policy version."""

import asyncio
import os
import platform
import time

from bus.connection import Bus
from bus.connection.status import Activity, report_status
from bus.errors import BusAwayError
from bus.messages import PolicyManifest, SnapshotWanted
from bus.waiting import RETRY_S, set_within

NOTHING_ANNOUNCED = SnapshotWanted(incarnation="", policy_version=-1, reason="no policy is announced")


def actor_name() -> str:
    return f"actor-{platform.node()}-{os.getpid()}"


async def first_policy(
    bus: Bus, patience_s: float, stop: asyncio.Event, *, learner: str = "launch learner"
) -> PolicyManifest | None:
    """Return the first policy manifest, or None on `stop`. Raises `BusAwayError` after `patience_s`, which
    names `learner`, the command that publishes one."""
    finished = asyncio.Event()
    waiting = "waiting for the learner's first policy version"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            report_status(
                bus,
                source=actor_name(),
                role="actor",
                look=lambda: Activity(waiting, wait="policy"),
                stop=finished,
                waits_for=lambda: "the learner's first policy version",
            )
        )
        try:
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                found = await bus.get("policy", PolicyManifest)
                if found is not None or stop.is_set():
                    return found[0] if found else None
                await bus.notify(bus.subject("notice", "snapshot"), NOTHING_ANNOUNCED)
                await set_within(stop, RETRY_S * bus.slower)
        finally:
            finished.set()
    raise BusAwayError(f"waited {patience_s:g} s for a policy: is `{learner}` running for this run?")
