"""Turns of rollouts that have not ended, so that the next actor need not sample them again.

They are of use until the group of their lease is full or settled, and are removed then."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import structlog

from bus.codec import decode, encode
from bus.errors import LostDataError, StorageError
from bus.trajectory import KeptTurn
from storage.store.group_database import GroupDatabase

log = structlog.get_logger()
_FIND = "SELECT body FROM turns WHERE lease_id = ? ORDER BY rollout, number"


class KeptTurns:
    """The turns that one store keeps, in its database. All may be called from any thread."""

    def __init__(self, database: GroupDatabase, *, is_late: Callable[[int], bool]) -> None:
        """`is_late` tells whether nothing will be added to the group of a lease any more."""
        self.counts = Counter[str]()
        """Turns that were `stored`, that were removed when their group was `completed`, and that were of no
        use any more: they came late, or their lease was settled without a group. From the opening on."""
        self._database = database
        self._is_late = is_late
        self._leases: Counter[int] = Counter()
        """Turns by lease, as long as there are any."""
        self._changing = threading.Lock()

    def load(self) -> None:
        """Read which leases have turns; nothing is made. Raises `StorageError` for a damaged database."""
        with self._changing, self._database.reading() as sql:
            query = "SELECT lease_id, COUNT(*) FROM turns GROUP BY lease_id"
            has_table = "SELECT 1 FROM sqlite_master WHERE name = 'turns'"  # older builds made none
            there = sql is not None and sql.execute(has_table).fetchone()
            self._leases = Counter(dict(sql.execute(query).fetchall()) if sql is not None and there else {})

    def number_of(self, lease_id: int) -> int:
        return self._leases[lease_id]

    def __bool__(self) -> bool:
        return bool(self._leases)

    def of(self, lease_id: int) -> list[KeptTurn]:
        """Return the turns of a lease, by rollout and number."""
        if not self._leases[lease_id]:
            return []
        with self._database.reading() as sql:
            rows = [] if sql is None else sql.execute(_FIND, (lease_id,)).fetchall()
        return [decode(body, KeptTurn) for (body,) in rows]

    def keep(self, turns: Sequence[KeptTurn]) -> None:
        """Store these turns durably, each in place of an earlier one of its number.

        Those of groups that are full or settled are of no use. Raises `StorageError` when the disk refuses.
        """
        fresh = [turn for turn in turns if not self._is_late(turn.lease_id)]
        self.counts["expired"] += len(turns) - len(fresh)
        if not fresh:
            return
        leases = {turn.lease_id for turn in fresh}
        with self._changing, self._database.transaction() as sql:
            sql.executemany(
                "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)",
                [(turn.lease_id, turn.rollout, turn.number, encode(turn)) for turn in fresh],
            )
            query = "SELECT COUNT(*) FROM turns WHERE lease_id = ?"
            self._leases.update({n: sql.execute(query, (n,)).fetchone()[0] - self._leases[n] for n in leases})
        self.counts["stored"] += len(fresh)

    def remove(self, lease_ids: Iterable[int], *, reason: str) -> None:
        """Remove the turns of these leases, and count them under `reason`.

        Where the disk refuses they stay until their lease is settled: whoever stores trajectories must not
        fail by them. Raises `LostDataError` for a damaged database."""
        with self._changing:
            gone = {n: self._leases[n] for n in lease_ids if n in self._leases}
            if not gone:
                return
            try:
                with self._database.transaction() as sql:
                    sql.executemany("DELETE FROM turns WHERE lease_id = ?", [(n,) for n in gone])
            except LostDataError:
                raise
            except StorageError as error:
                log.warning("turns_not_removed", lease_ids=list(gone), reason=str(error))
                return
            for lease_id in gone:
                del self._leases[lease_id]
            self.counts[reason] += sum(gone.values())

    def remove_settled(self, is_settled: Callable[[int], bool]) -> None:
        """Remove the turns of leases that are settled: no group will come of them."""
        self.remove([n for n in self._leases.copy() if is_settled(n)], reason="expired")


def turn_counts(kept: Iterable[KeptTurns]) -> dict[str, int]:
    """Return the turns that several stores stored and that were of no use, for a screen."""
    counts = sum((turns.counts for turns in kept), Counter[str]())
    return {"kept_turns": counts["stored"], "expired_turns": counts["expired"]}
