"""A run whose dispatcher admits leases."""

import sqlite3

from bus.requests import StoredGroups
from storage.dispatch.admission import Admission
from storage.ledger.ledger import Ledger
from storage.settings.admission import AdmissionConfig
from tests.storage.serving import manifest


class Run:
    """A run whose groups complete when told to."""

    def __init__(self, sql: sqlite3.Connection, config: AdmissionConfig, *, seed: int = 0) -> None:
        self.ledger = Ledger(sql)
        self.admission = Admission(self.ledger, config, seed=seed)
        self.admission.opened = True
        self.admission.resume(0, "a")
        self.publish(0)

    def publish(self, version: int) -> list[int]:
        """The leases issued at the version."""
        self.admission.on_policy(manifest(version))
        return self.admission.issue()

    def store(self, *lease_ids: int) -> None:
        after = self.admission.seen(0)
        self.admission.on_stored(
            StoredGroups(shard=0, after=after, lease_ids=lease_ids, total=after + len(lease_ids))
        )

    def batch(self, step: int, *, now_s: float = 0.0) -> list[int] | str:
        answer = self.admission.batch(step, step - 1, now_s=now_s)
        return answer if isinstance(answer, str) else [use.lease_id for use in answer]
