"""Counts over a whole ledger, which are read once, and whether its entries add up."""

import sqlite3
from collections import Counter
from dataclasses import dataclass

from bus.errors import StorageError

_NOT_OPEN = (
    "SELECT uses.lease_id, step FROM uses LEFT JOIN leases USING (lease_id) WHERE state IS NULL "
    "OR state NOT IN ('leased', 'committed') ORDER BY step, place LIMIT 1"
)


@dataclass(frozen=True)
class Totals:
    """Counts over a whole ledger, as of its opening."""

    next_id: int
    trained: int
    """Groups given to at least one step."""
    samples: int
    """Groups given to steps, each as often as it was given."""
    newest_step: int
    reasons: Counter[str]
    """Why groups were rejected, and how many."""


def totals(sql: sqlite3.Connection, states: tuple[str, ...]) -> Totals:
    """Count what is in the ledger. Raises `StorageError` when its entries do not add up.

    Args:
        sql: the ledger.
        states: all that a lease may be in.
    """
    marks = ", ".join("?" * len(states))
    query = f"SELECT lease_id, state FROM leases WHERE state NOT IN ({marks}) LIMIT 1"
    if (odd := sql.execute(query, states).fetchone()) is not None:
        raise StorageError(f"lease {odd[0]} is {odd[1]!r}")
    if (odd := sql.execute(_NOT_OPEN).fetchone()) is not None:
        raise StorageError(f"lease {odd[0]} is not open to step {odd[1]}, which has it")
    [(next_id, trained)] = sql.execute(
        "SELECT COALESCE(MAX(lease_id) + 1, 0), COUNT(*) FILTER (WHERE state IN ('leased', 'committed')) "
        "FROM leases"
    )
    [(named, samples, newest)] = sql.execute(
        "SELECT COUNT(DISTINCT lease_id), COUNT(*), COALESCE(MAX(step), 0) FROM uses"
    )
    if named != trained:
        raise StorageError(f"{trained} leases are in steps, which name {named}")
    rejected = sql.execute(
        "SELECT COALESCE(reason, ''), COUNT(*) FROM leases WHERE state = 'rejected' GROUP BY reason"
    )
    reasons = Counter(dict(rejected.fetchall()))
    return Totals(next_id=next_id, trained=trained, samples=samples, newest_step=newest, reasons=reasons)
