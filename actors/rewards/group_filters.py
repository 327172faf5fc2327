"""Group filters: they keep a group, or drop it with a reason."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from bus.plugins import load_function
from bus.trajectory import AgentReward, episode_rewards

log = structlog.get_logger()
GroupFilter = Callable[[Sequence[float]], str | None]
"""A filter takes an agent's rewards, one for each episode of a group, and returns the reason to drop the
group, or None to keep it. Reasons are counted, so there are to be few."""


def reason_to_drop(keep: GroupFilter, rewards: Iterable[AgentReward]) -> str | None:
    """Return why a group is to be dropped: the filter keeps no agent's rewards, fails, or there are none.

    A filter that raises, or returns neither None nor a reason, drops the group as `filter_failed: <why>`."""
    by_agent = episode_rewards(rewards)
    if not by_agent:
        return "nothing_to_train"
    reasons = []
    for episodes in by_agent.values():
        try:
            reason = keep(list(episodes.values()))
        except Exception as error:
            log.exception("filter_failed")
            return f"filter_failed: it raised {error!r}"
        if not (reason is None or (isinstance(reason, str) and reason)):
            return f"filter_failed: it returned {reason!r}: return a reason, or None to keep the group"
        reasons.append(reason)
    return None if None in reasons else reasons[0]


def keep_all(rewards: Sequence[float]) -> str | None:
    """Keep every group."""
    return None


def drop_zero_variance(rewards: Sequence[float]) -> str | None:
    """Drop a group in which no agent's rewards differ: its advantages are zero."""
    return None if len(set(rewards)) > 1 else "zero_variance"


FILTERS: Mapping[str, GroupFilter] = {
    "none": keep_all,
    "zero_variance": drop_zero_variance,
}


def load_filter(name: str) -> GroupFilter:
    """Return the group filter of that name; raises ConfigError for one that cannot be loaded."""
    return load_function("group filter", name, FILTERS)
