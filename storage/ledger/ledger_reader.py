"""What the ledger of a run says, for looking back: it is only read, and may be in use."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from bus.errors import ConfigError


def states_of(ledger: Path) -> dict[int, tuple[str, int]]:
    """Return, by lease, its state and the learner's version when it was issued. Raises `ConfigError`."""
    rows = _rows(ledger, "SELECT lease_id, state, policy_version FROM leases")
    return {lease_id: (state, version) for lease_id, state, version in rows}


def reasons_of(ledger: Path) -> dict[int, str]:
    """Return why leases were rejected, by lease. Raises `ConfigError`."""
    rows = _rows(ledger, "SELECT lease_id, reason FROM leases WHERE state = 'rejected'")
    return {lease_id: reason or "" for lease_id, reason in rows}


def leases_of_steps(ledger: Path) -> dict[int, list[int]]:
    """Return, by step, the leases that it trained on. Raises `ConfigError`."""
    steps: dict[int, list[int]] = {}
    for step, lease_id in _rows(ledger, "SELECT step, lease_id FROM uses ORDER BY step, place"):
        steps.setdefault(step, []).append(lease_id)
    return steps


def leases_of_step(ledger: Path, step: int) -> list[int]:
    """Return the leases that one step trained on, in their order. Raises `ConfigError`."""
    rows = _rows(ledger, "SELECT lease_id FROM uses WHERE step = ? ORDER BY place", step)
    return [lease_id for (lease_id,) in rows]


def steps_of_lease(ledger: Path, lease_id: int) -> list[int]:
    """Return the steps that trained on a lease, ascending. Raises `ConfigError`."""
    return [
        step for (step,) in _rows(ledger, "SELECT step FROM uses WHERE lease_id = ? ORDER BY step", lease_id)
    ]


def facts_of(ledger: Path) -> dict[str, str]:
    """Return the named values of a ledger. Raises `ConfigError`."""
    return dict(_rows(ledger, "SELECT name, value FROM facts"))


def _rows(ledger: Path, query: str, *values: int) -> list[tuple[Any, ...]]:
    if not ledger.exists():
        raise ConfigError(f"{ledger} is missing: look back where the run's storage was")
    try:
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as sql:
            return sql.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{ledger} cannot be read ({error}): restore it") from error
