"""Answers actors about leases that came back to them, and quarantines what kills its actors."""

import asyncio
from collections.abc import Callable

from bus.codec import Message
from bus.requests import LeaseRequest
from storage.dispatch.admission import Admission
from storage.dispatch.ledger import Ledger
from storage.prompts.data_sets import DataSets

FREE_DELIVERIES = 2
"""Deliveries of a lease that prove nothing against it: its actor died of another one, or was stopped."""


class LeaseStatus:
    """What becomes of leases that are delivered again and again."""

    def __init__(
        self, ledger: Ledger, admission: Admission, data: DataSets, *,
        max_deliver: int, on_refund: Callable[[], None],
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._admission = admission
        self._data = data
        self._attempts = max_deliver - FREE_DELIVERIES
        self._on_refund = on_refund

    async def answer(self, request: LeaseRequest) -> list[Message]:
        """Where the lease stands. Counts the attempt that begins with this answer, or refuses it."""
        if request.attempt and request.lease_id in self._ledger.rolling_out:
            self._count(request.lease_id)
        state = self._admission.state(request.lease_id)
        await asyncio.to_thread(self._ledger.flush)  # before the attempt that may be the actor's last
        return [state]

    def _count(self, lease_id: int) -> None:
        name = f"attempts.{lease_id}"
        before = int(self._ledger.facts.get(name, "0"))
        if before < self._attempts:
            self._ledger.set_fact(name, str(before + 1))
            return
        self._data.quarantine(lease_id)
        self._ledger.reject(lease_id, "quarantined")
        self._on_refund()
