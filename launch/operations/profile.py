"""`launch profile`: has the learner of a running run trace its next steps."""

import asyncio

from bus.connection.bus import Bus
from bus.requests import Profiled, ProfileRequest
from launch.operations.process_answer import Asked, answer_of
from launch.settings.run_config import RunConfig


async def take_profile(where: RunConfig, steps: int, timeout_s: float, stop: asyncio.Event) -> Profiled:
    """Return where the profile of the next steps lies, on the learner's host, and what it says.

    Raises `BusAwayError` where no learner answers in time, and `ConfigError` with the reason of one that
    refuses."""
    async with Bus.connect(where.bus, where.run, name="profile") as bus:
        request, subject = ProfileRequest(steps=steps), bus.subject("rpc", "profile")
        asked = Asked(
            "the learner",
            f"run {where.run!r} has no profile of {steps} steps",
            "whether it takes the profile is not known: one that it took lies in profiles/ of the run, and "
            "`launch status` says what it does",
        )
        return await answer_of(bus, subject, request, Profiled, asked, timeout_s=timeout_s)
