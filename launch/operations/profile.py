"""`launch profile`: has the learner of a running run trace its next steps."""

import asyncio

from bus.connection.bus import Bus
from bus.errors import BusError, ConfigError
from bus.requests import Profiled, ProfileRequest
from launch.settings.run_config import RunConfig


async def take_profile(where: RunConfig, steps: int, timeout_s: float, stop: asyncio.Event) -> Profiled:
    """Return where the profile of the next steps lies, on the learner's host, and what it says.

    Raises `ConfigError` where no learner answers in time, with the reason of one that refuses."""
    async with Bus.connect(where.bus, where.run, name="profile") as bus:
        request = ProfileRequest(steps=steps)
        try:
            return await bus.request(bus.subject("rpc", "profile"), request, Profiled, timeout_s=timeout_s)
        except BusError as error:
            raise ConfigError(
                f"run {where.run!r} has no profile of {steps} steps: {error.refusal or error} "
                "(`launch status` says what its learner does)"
            ) from error
