"""What a bus of a run has before its processes come."""

from bus.connection import Bus
from bus.topology import ensure


async def make_run(bus: Bus, *, shards: int = 1) -> None:
    """Make the run's streams and keys, as storage does."""
    await ensure(bus.js, bus.topology, shards)
    await bus.create_keys()
