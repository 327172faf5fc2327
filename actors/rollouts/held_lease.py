"""A lease of a further policy, while one group has it."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bus.messages import Lease

if TYPE_CHECKING:
    from actors.rollouts.leases import PolicyLeases


@dataclass(eq=False)
class HeldLease:
    """Belongs to one group until that ends. Unless it is settled by then, another group may have it."""

    lease: Lease
    version: int
    """Oldest version of its policy that may sample for it."""
    leases: "PolicyLeases"
    is_settled: bool = False
    """Whether the lease's group is on the stream, or its rejection is."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def is_still_open(self) -> bool:
        """Ask again which versions may sample for it; return False if it is settled. Raises as
        `PolicyLeases.may_sample` does."""
        version = await self.leases.may_sample(self.lease, asks=True)
        self.version = self.version if version is None else version
        return version is not None
