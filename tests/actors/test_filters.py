"""Group filters keep or drop with a reason."""

import pytest

from actors.rewards.group_filters import FILTERS, load_filter
from bus.errors import ConfigError


def test_zero_variance_drops_groups_without_a_signal():
    assert FILTERS["zero_variance"]([1.0, 1.0, 1.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0]) == "zero_variance"
    assert FILTERS["zero_variance"]([]) == "zero_variance"
    assert FILTERS["zero_variance"]([0.0, 1.0]) is None


def test_none_keeps_everything():
    assert load_filter("none")([1.0, 1.0]) is None


def test_an_unknown_filter_names_the_nearest():
    with pytest.raises(
        ConfigError, match="no group filter named 'zero_varianse': did you mean 'zero_variance'"
    ):
        load_filter("zero_varianse")
