"""Group filters keep or drop with a reason."""

import sys

import numpy as np
import pytest
from pydantic import ValidationError

from actors.rewards.group_filters import FILTERS, AgentRewards, EpisodeSize, load_filter, reason_to_drop
from actors.settings.groups import GroupLimitsConfig
from bus.agent_rewards import AgentReward
from bus.errors import ConfigError


def test_zero_variance_drops_groups_without_a_signal():
    assert FILTERS["zero_variance"]([1.0, 1.0, 1.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0, 1.0]) is None


def test_rewards_that_differ_by_rounding_have_no_variance():
    keep = FILTERS["zero_variance"]
    assert keep([0.1 + 0.2, 0.3]) == "zero_variance"
    assert keep([float(np.float32(0.1)), 0.1]) == "zero_variance"
    assert keep([0.1 + 0.2 - 0.3, 0.0]) == "zero_variance"
    assert keep([1e6, 1e6 + 0.5]) == "zero_variance"
    assert keep([1.0, 1.0 + 3e-6]) is None
    assert keep([0.0, 3e-9]) is None
    assert keep([1e-8, 2e-8]) is None


def rewards_of(solver, critic):
    both = {"solver": solver, "critic": critic}
    return [AgentReward("default", agent, n, r) for agent, found in both.items() for n, r in enumerate(found)]


def test_a_group_is_dropped_when_no_agents_rewards_differ():
    keep = FILTERS["zero_variance"]
    assert reason_to_drop(keep, rewards_of(solver=[1.0, 1.0], critic=[10.0, 10.0])) == ("zero_variance", "")
    assert reason_to_drop(keep, rewards_of(solver=[0.0, 1.0], critic=[10.0, 10.0])) is None
    assert reason_to_drop(keep, rewards_of(solver=[1.0, 1.0], critic=[9.0, 10.0])) is None
    assert reason_to_drop(FILTERS["none"], []) == ("nothing_to_train", "")
    assert reason_to_drop(lambda _: "dull: all say a: b", rewards_of([1.0], [])) == ("dull", "all say a: b")


def test_none_keeps_everything():
    assert load_filter("none")([1.0, 1.0]) is None


def test_an_unknown_filter_names_the_nearest():
    with pytest.raises(
        ConfigError, match="no group filter named 'zero_varianse': did you mean 'zero_variance'"
    ):
        load_filter("zero_varianse")


def sized(*sizes):
    return AgentRewards([1.0] * len(sizes), [size and EpisodeSize(*size) for size in sizes])


@pytest.mark.parametrize(
    ("rewards", "limits", "reason"),
    [
        (AgentRewards([0.0, 0.5]), {"mean_reward_min": 0.25}, None),
        (AgentRewards([0.0, 0.5]), {"mean_reward_min": 0.3}, "reward_too_low"),
        (AgentRewards([0.0, 0.5]), {"mean_reward_max": 0.2}, "reward_too_high"),
        (AgentRewards([0.0, 0.5]), {"mean_reward_min": 0.1, "mean_reward_max": 0.9}, None),
        (sized((4, False), (8, True)), {"mean_tokens_min": 6, "mean_tokens_max": 6}, None),
        (sized((4, False), (8, True)), {"mean_tokens_min": 6.5}, "too_short"),
        (sized((4, False), (8, True)), {"mean_tokens_max": 5.5}, "too_long"),
        (sized((9, False), None), {"mean_tokens_max": 5.5}, "too_long"),
        (sized(None, None), {"mean_tokens_min": 6.5}, None),
        (sized((8, True), (8, True)), {"drop_all_truncated": True}, "all_truncated"),
        (sized((8, True), (8, False)), {"drop_all_truncated": True}, None),
        (sized((8, True), None), {"drop_all_truncated": True}, None),
        (sized((8, True), (8, True)), {}, None),
    ],
)
def test_limits_drop_with_a_reason(rewards, limits, reason):
    assert load_filter("none", GroupLimitsConfig(**limits))(rewards) == reason


def test_limits_come_before_the_filter_and_bounds_that_keep_nothing_are_refused():
    keep = load_filter("zero_variance", GroupLimitsConfig(mean_reward_max=0.5))
    assert keep(AgentRewards([1.0, 1.0])) == "reward_too_high"
    assert keep(AgentRewards([0.0, 0.0])) == "zero_variance"
    with pytest.raises(ValidationError, match=r"mean_reward_min=1 above mean_reward_max=0\.5 would reject"):
        GroupLimitsConfig(mean_reward_min=1.0, mean_reward_max=0.5)


def test_a_filter_that_exits_drops_the_group_and_ends_no_actor():
    name, detail = reason_to_drop(lambda _: sys.exit(2), rewards_of([0.0, 1.0], []))
    assert (name, "SystemExit(2)" in detail) == ("filter_failed", True)


def test_a_filter_sees_rewards_as_a_sequence_and_sizes_beside_them():
    seen = []
    sizes = {("default", "solver", 1): EpisodeSize(3, truncated=True)}
    assert reason_to_drop(seen.append, rewards_of(solver=[0.0, 1.0], critic=[]), sizes) is None
    [rewards] = seen
    assert (list(rewards), rewards[1], len(rewards), min(rewards)) == ([0.0, 1.0], 1.0, 2, 0.0)
    assert rewards.sizes == [None, EpisodeSize(3, truncated=True)]
