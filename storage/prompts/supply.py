"""What the dispatcher asks of whoever decides which prompts come next."""

import asyncio
from collections.abc import Sequence
from typing import Protocol


class Supply(Protocol):
    """Provides for the prompts of leases that are yet to be issued."""

    @property
    def left(self) -> float:
        """Return how many leases may be issued now: their prompts are known."""

    @property
    def waits_for(self) -> str:
        """Return what the supply waits for, in words; empty where it waits for nothing."""

    @property
    def wants_rewards(self) -> bool:
        """Tell whether rewards of groups are asked for."""

    async def extend(self, wanted: int, stop: asyncio.Event) -> None:
        """Decide on the prompts of `wanted` leases, or of fewer: it is asked again once those are issued."""

    def note(self, lease_id: int, rewards: Sequence[float]) -> None:
        """Hear once of each group that is complete or rejected, with its rewards if they are known."""
