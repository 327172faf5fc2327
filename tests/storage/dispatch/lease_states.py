"""What a ledger says of leases."""

from bus.connection import Bus
from tests.storage.serving import Storage, send_groups, until


async def stored(storage: Storage, count: int) -> None:
    """Return once the ledger knows of so many groups that wait for a step."""
    await until(lambda: len(storage.ledger.stored) == count)


async def rolled_out(bus: Bus, storage: Storage) -> None:
    """Everything issued is rolled out and known to be stored."""
    expected = len(storage.ledger.stored) + len(storage.ledger.rolling_out)
    await send_groups(bus, list(storage.ledger.rolling_out))
    await stored(storage, expected)
