"""Which groups are worth training on: keep, or drop with a reason."""

from collections.abc import Callable, Mapping, Sequence

from bus.plugins import load_function

GroupFilter = Callable[[Sequence[float]], str | None]
"""From the rewards of a group to the reason to drop it, or None to keep it; reasons are counted, so few."""


def keep_all(rewards: Sequence[float]) -> str | None:
    """Keep every group."""
    return None


def drop_zero_variance(rewards: Sequence[float]) -> str | None:
    """Drop a group whose rewards are all equal: its advantages are zero."""
    return None if len(set(rewards)) > 1 else "zero_variance"


FILTERS: Mapping[str, GroupFilter] = {
    "none": keep_all,
    "zero_variance": drop_zero_variance,
}


def load_filter(name: str) -> GroupFilter:
    """Return the group filter of that name; raises ConfigError for one that cannot be loaded."""
    return load_function("group filter", name, FILTERS)
