"""What the ledger of a run says, for looking back: it is only read, and may be in use."""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from bus.errors import ConfigError


@dataclass(frozen=True)
class GroupUse:
    """What became of the group of a lease."""

    state: str
    reason: str = ""
    """Why the group was rejected."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """The group's weight in each step that trained on it, ascending."""


def reasons_of(ledger: Path) -> dict[int, str]:
    """Return why leases were rejected, by lease. Raises `ConfigError`."""
    rows = rows_in(ledger, "SELECT lease_id, reason FROM leases WHERE state = 'rejected'")
    return {lease_id: reason or "" for lease_id, reason in rows}


def leases_of_steps(ledger: Path) -> dict[int, list[int]]:
    """Return, by step, the leases that it trained on. Raises `ConfigError`."""
    steps: dict[int, list[int]] = {}
    for step, lease_id in rows_in(ledger, "SELECT step, lease_id FROM uses ORDER BY step, place"):
        steps.setdefault(step, []).append(lease_id)
    return steps


def leases_of_step(ledger: Path, step: int) -> list[int]:
    """Return the leases that one step trained on, in their order. Raises `ConfigError`."""
    rows = rows_in(ledger, "SELECT lease_id FROM uses WHERE step = ? ORDER BY place", step)
    return [lease_id for (lease_id,) in rows]


def use_of_leases(ledger: Path, lease_ids: Iterable[int]) -> dict[int, GroupUse]:
    """Return what became of each of these leases, as far as the ledger has them. Raises `ConfigError`."""
    wanted = [*lease_ids]
    found = rows_in(
        ledger,
        "SELECT lease_id, state, COALESCE(reason, ''), step, weight "
        "FROM leases LEFT JOIN uses USING (lease_id) "
        f"WHERE lease_id IN ({', '.join('?' * len(wanted))}) ORDER BY lease_id, step",
        *wanted,
    )
    groups = {}
    for lease_id, rows in groupby(found, key=itemgetter(0)):
        known = [*rows]
        steps = {step: weight for *_, step, weight in known if step is not None}
        groups[lease_id] = GroupUse(known[0][1], known[0][2], steps)
    return groups


def facts_of(ledger: Path) -> dict[str, str]:
    """Return the named values of a ledger. Raises `ConfigError`."""
    return dict(rows_in(ledger, "SELECT name, value FROM facts"))


def rows_in(ledger: Path, query: str, *values: int) -> list[tuple[Any, ...]]:
    """Return what a query finds in a ledger. Raises `ConfigError` for one that is missing or unreadable."""
    if not ledger.exists():
        raise ConfigError(f"{ledger} is missing: look back where the run's storage was")
    try:
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as sql:
            return sql.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{ledger} cannot be read ({error}): restore it") from error
