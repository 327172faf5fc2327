"""What a ledger says of all leases, which only the accounts of benchmarks and soaks ask for at once."""

import sqlite3
from contextlib import closing
from pathlib import Path

from bus.errors import ConfigError


def states_of(ledger: Path) -> dict[int, tuple[str, int]]:
    """Return, by lease, its state and the learner's version when it was issued. Raises `ConfigError`."""
    if not ledger.exists():
        raise ConfigError(f"{ledger} is missing: look back where the run's storage was")
    try:
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as sql:
            rows = sql.execute("SELECT lease_id, state, policy_version FROM leases").fetchall()
    except sqlite3.Error as error:
        raise ConfigError(f"{ledger} cannot be read ({error}): restore it") from error
    return {lease_id: (state, version) for lease_id, state, version in rows}
