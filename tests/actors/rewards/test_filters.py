"""Group filters keep or drop with a reason."""

import pytest

from actors.rewards.group_filters import FILTERS, load_filter, reason_to_drop
from bus.errors import ConfigError
from bus.trajectory import AgentReward


def test_zero_variance_drops_groups_without_a_signal():
    assert FILTERS["zero_variance"]([1.0, 1.0, 1.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0, 1.0]) is None


def rewards_of(solver, critic):
    both = {"solver": solver, "critic": critic}
    return [AgentReward("default", agent, n, r) for agent, found in both.items() for n, r in enumerate(found)]


def test_a_group_is_dropped_when_no_agents_rewards_differ():
    keep = FILTERS["zero_variance"]
    assert reason_to_drop(keep, rewards_of(solver=[1.0, 1.0], critic=[10.0, 10.0])) == "zero_variance"
    assert reason_to_drop(keep, rewards_of(solver=[0.0, 1.0], critic=[10.0, 10.0])) is None
    assert reason_to_drop(keep, rewards_of(solver=[1.0, 1.0], critic=[9.0, 10.0])) is None
    assert reason_to_drop(FILTERS["none"], []) == "nothing_to_train"


def test_none_keeps_everything():
    assert load_filter("none")([1.0, 1.0]) is None


def test_an_unknown_filter_names_the_nearest():
    with pytest.raises(
        ConfigError, match="no group filter named 'zero_varianse': did you mean 'zero_variance'"
    ):
        load_filter("zero_varianse")
