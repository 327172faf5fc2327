"""Answers actors about leases that came back to them, and quarantines what kills its actors."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from bus.codec import Message
from bus.requests import LeaseRequest
from storage.dispatch.admission import Admission
from storage.ledger.ledger import ATTEMPTS, Ledger
from storage.prompts.data_sets import DataSets

FREE_DELIVERIES = 1
"""Deliveries of a lease whose end is not looked into: a lease costs its first actor no request."""
IN_COMPANY = 2
"""Attempts of a lease which ended with their actor before it is a suspect. They accuse nothing, since what
ran beside the lease, or whoever took the machine away, may have ended the actor as well."""


def is_suspect(attempts: int) -> bool:
    """Return whether a lease with so many counted attempts is to be the only suspect that its actor runs."""
    return attempts >= IN_COMPANY


class LeaseStatus:
    """Decides what becomes of leases that are delivered again and again."""

    def __init__(
        self, ledger: Ledger, admission: Admission, data: DataSets, *,
        max_deliver: int, on_refund: Callable[[], None],
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._admission = admission
        self._data = data
        self._attempts = IN_COMPANY + max_deliver
        self._on_refund = on_refund

    async def answer(self, request: LeaseRequest) -> list[Message]:
        """Return where the lease stands. Counts the attempt that begins with this answer, or refuses it."""
        if request.lease_id in self._ledger.rolling_out:
            if request.attempt:
                self._count(request.lease_id)
            elif request.excused:
                self._set_attempts(request.lease_id, max(0, self._attempts_of(request.lease_id) - 1))
        state = replace(self._admission.state(request.lease_id), attempts=self._attempts_of(request.lease_id))
        await asyncio.to_thread(self._ledger.flush)  # before the attempt that may be the actor's last
        return [state]

    def _count(self, lease_id: int) -> None:
        before = self._attempts_of(lease_id)
        if before < self._attempts:
            self._set_attempts(lease_id, before + 1)
            return
        self._data.quarantine(lease_id)
        self._ledger.reject(lease_id, "quarantined")
        self._on_refund()

    def _attempts_of(self, lease_id: int) -> int:
        return int(self._ledger.facts.get(f"{ATTEMPTS}{lease_id}", "0"))

    def _set_attempts(self, lease_id: int, attempts: int) -> None:
        self._ledger.set_fact(f"{ATTEMPTS}{lease_id}", str(attempts))
