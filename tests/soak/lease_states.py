"""What a ledger says of all leases, which only the accounts of benchmarks and soaks ask for at once."""

from pathlib import Path

from storage.ledger.ledger_reader import rows_in


def states_of(ledger: Path) -> dict[int, tuple[str, int]]:
    """Return, by lease, its state and the learner's version when it was issued. Raises `ConfigError`."""
    rows = rows_in(ledger, "SELECT lease_id, state, policy_version FROM leases")
    return {lease_id: (state, version) for lease_id, state, version in rows}
