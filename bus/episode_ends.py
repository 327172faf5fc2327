"""How episodes ended, counted: what of them the surroundings of the policy broke."""

from collections.abc import Mapping

from bus.trajectory import TRUSTED_ENDS


def infra_failed(ends: Mapping[str, int]) -> int:
    """Return the number of episodes whose end is not to be trusted, so that they are not trained on.

    Args:
        ends: episodes by end.
    """
    return sum(number for end, number in ends.items() if end not in TRUSTED_ENDS)


def infra_failed_fraction(ends: Mapping[str, int]) -> float | None:
    """Return the fraction of episodes that failed for reasons outside the policy; None without episodes."""
    episodes = sum(ends.values())
    return infra_failed(ends) / episodes if episodes else None
