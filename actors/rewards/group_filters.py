"""Group filters: they keep a group, or drop it with a reason."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, overload

import structlog

from actors.settings.groups import GroupLimitsConfig
from bus.agent_rewards import AgentReward, are_equal, episode_rewards
from bus.process.plugins import RAISED, load_function

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EpisodeSize:
    """How much an agent sampled in an episode."""

    tokens: int
    truncated: bool
    """Whether the episode was cut off at a limit of tokens or turns."""


Sizes = Mapping[tuple[str, str, int], EpisodeSize]
"""Sizes by policy, agent and rollout; without those of episodes that another actor has stored."""


@dataclass(frozen=True)
class AgentRewards(Sequence[float]):
    """An agent's rewards in a group, one for each episode, and how long the episodes are."""

    rewards: Sequence[float]
    sizes: Sequence[EpisodeSize | None] = field(default=())
    """Sizes of the same episodes, in the same order; None for one that another actor has stored."""

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        return self.rewards[index]

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def known_sizes(self) -> list[EpisodeSize]:
        return [size for size in self.sizes if size is not None]

    @property
    def all_truncated(self) -> bool:
        """Return whether every episode is known to have been cut off."""
        return bool(self.sizes) and all(size is not None and size.truncated for size in self.sizes)


GroupFilter = Callable[[AgentRewards], str | None]
"""A filter takes an agent's rewards, one for each episode of a group, and returns the reason to drop the
group, or None to keep it. Reasons are counted, so there are to be few."""


class DropReason(NamedTuple):
    """Why a group is dropped."""

    name: str
    """By which reasons are counted."""
    detail: str = ""


def reason_to_drop(
    keep: GroupFilter, rewards: Iterable[AgentReward], sizes: Sizes | None = None
) -> DropReason | None:
    """Return why a group is to be dropped: the filter keeps no agent's rewards, fails, or there are none. A
    filter that raises, or returns neither None nor a reason, drops the group as `filter_failed`. What a
    filter returns may have a detail after its name and a colon."""
    by_agent = episode_rewards(rewards)
    if not by_agent:
        return DropReason("nothing_to_train")
    reasons = []
    for (policy, agent), episodes in by_agent.items():
        found = [(sizes or {}).get((policy, agent, rollout)) for rollout in episodes]
        try:
            reason = keep(AgentRewards(list(episodes.values()), found))
        except RAISED as error:
            log.exception("filter_failed")
            return DropReason("filter_failed", f"it raised {error!r}")
        if not (reason is None or (isinstance(reason, str) and reason)):
            detail = f"it returned {reason!r}: return a reason, or None to keep the group"
            return DropReason("filter_failed", detail)
        reasons.append(reason)
    if None in reasons:
        return None
    name, _, detail = str(reasons[0]).partition(": ")
    return DropReason(name, detail)


def keep_all(rewards: AgentRewards) -> str | None:
    """Keep every group."""
    return None


def drop_zero_variance(rewards: AgentRewards) -> str | None:
    """Drop a group in which no agent's rewards differ, but for rounding: its advantages are zero."""
    return "zero_variance" if are_equal(rewards) else None


FILTERS: Mapping[str, GroupFilter] = {"none": keep_all, "zero_variance": drop_zero_variance}


def load_filter(name: str, limits: GroupLimitsConfig | None = None) -> GroupFilter:
    """Return the filter that applies the limits and then the one of that name. Raises ConfigError for a name
    that cannot be loaded."""
    named = load_function("group filter", name, FILTERS)
    if limits is None or limits == GroupLimitsConfig():
        return named
    return lambda rewards: reason_of_limits(rewards, limits) or named(rewards)


def reason_of_limits(rewards: AgentRewards, limits: GroupLimitsConfig) -> str | None:
    """Return which limit a group is beyond; None if it is within all of them. Lengths are those of the
    episodes that this actor rolled out; without any the group is kept."""
    if limits.drop_all_truncated and rewards.all_truncated:
        return "all_truncated"
    if reason := _outside(fmean(rewards), limits.mean_reward_min, limits.mean_reward_max):
        return f"reward_{reason}"
    if not rewards.known_sizes:
        return None
    tokens = fmean(size.tokens for size in rewards.known_sizes)
    reason = _outside(tokens, limits.mean_tokens_min, limits.mean_tokens_max)
    return {"too_low": "too_short", "too_high": "too_long"}.get(reason or "")


def _outside(value: float, low: float | None, high: float | None) -> str | None:
    if low is not None and value < low:
        return "too_low"
    return "too_high" if high is not None and value > high else None
