"""The rewards that come with Sluice, by name, and loading of a user's own."""

from collections.abc import Mapping

from actors.rewards.base import Reward
from actors.rewards.matching import contains, exact, final_answer, last_number
from bus.plugins import load_function

REWARDS: Mapping[str, Reward] = {
    "contains": contains,
    "exact": exact,
    "final_answer": final_answer,
    "last_number": last_number,
}


def load_reward(name: str) -> Reward:
    """Return a built-in reward or `my_pkg.my_module:function`; raises ConfigError if it cannot be loaded."""
    return load_function("reward", name, REWARDS)
