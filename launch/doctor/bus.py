"""The bus as this host reaches it: whether it answers, how fast, and what its clock says."""

import time
from collections.abc import AsyncIterator

import nats.errors

from bus.config import without_credentials
from bus.connection.bus import Bus
from bus.connection.server_clock import server_clock
from bus.errors import BusError, ConfigError
from launch.doctor.findings import Finding, FindingLevel, brief
from launch.settings.run_config import RunConfig

CONNECT_S = 3.0
ANSWER_S = 2.0
TRIP_S = 10.0
"""Longest time of a round trip before the bus counts as away."""
LEAST_PAYLOAD = 1 << 20
"""Size of the parts in which large messages travel."""
CLOCK_S = 1.0
"""Difference between two clocks from which a warning is due."""
PINGS = 5
SLOW_S = 0.5
"""Time of a round trip from which a warning is due."""


async def check_bus(config: RunConfig, named: bool) -> AsyncIterator[Finding]:
    """Tell whether the bus answers, and compare its clock with this host's. Changes nothing on it."""
    if not named:
        yield Finding("bus", "ok", "none is named: `launch local` starts one")
        return
    url = without_credentials(config.bus.url)
    impatient = config.bus.model_copy(update={"connect_timeout_s": CONNECT_S, "patience_s": ANSWER_S})
    try:
        async with Bus.connect(impatient, config.run, name="doctor") as bus:
            for finding in [found async for found in _look(bus, url)]:
                yield finding
    except (BusError, ConfigError) as error:
        yield Finding(
            "bus", "error", f"{url}: {error}",
            "is `launch bus` running there, does a firewall let port 4222 through, and are --bus and --creds "
            "right?",
        )  # fmt: skip


async def _look(bus: Bus, url: str) -> AsyncIterator[Finding]:
    trips = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        try:
            await bus.client.flush(timeout=TRIP_S)
        except nats.errors.Error as error:
            yield Finding(
                "bus", "error", f"{url} takes the connection and then does not answer: {brief(error)}",
                "is its host overloaded or its nats-server suspended? Look at its log, or start it again",
            )  # fmt: skip
            return
        trips.append(time.perf_counter() - begin)
    trip_s, largest = min(trips), bus.client.max_payload
    server = str(bus.client.connected_server_version).strip("<>")
    level: FindingLevel = "warning" if trip_s > SLOW_S else "ok"
    remedy = "a run waits for many round trips: bring host and bus nearer" if level == "warning" else ""
    yield Finding("bus", level, f"{url} answers within {1000 * trip_s:.2g} ms: {server}", remedy)
    if largest < LEAST_PAYLOAD:
        yield Finding(
            "bus", "error", f"{url} takes messages of {largest} bytes at most",
            f"set max_payload of that nats-server to {LEAST_PAYLOAD} at least; 8 MB is right",
        )  # fmt: skip
    yield await _clock(bus)


async def _clock(bus: Bus) -> Finding:
    """Compare the clock of the bus with this host's, by the time at which it answers a question."""
    try:
        clock = await server_clock(bus, ANSWER_S)
    except BusError as error:
        remedy = "start that nats-server with JetStream, or use `launch bus`"
        return Finding("clock", "error", str(error), remedy)
    if clock is None:
        run = bus.topology.run
        return Finding(
            "clock", "ok", f"not compared: this bus has no run {run!r}, whose streams tell its time"
        )
    direction = "ahead" if clock.ahead_s > 0 else "behind"
    said = f"that of the bus is {abs(clock.ahead_s):.3f} s {direction}, +- {clock.uncertain_s:.3f} s"
    if abs(clock.ahead_s) - clock.uncertain_s > CLOCK_S:
        return Finding(
            "clock", "warning", said,
            "synchronise the clocks of both hosts (chrony, systemd-timesyncd): times on screens are wrong",
        )  # fmt: skip
    return Finding("clock", "ok", said)
