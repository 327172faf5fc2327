"""The rewards that come with Sluice, by name, and loading of a user's own."""

from collections.abc import Callable, Mapping
from typing import cast

from actors.rewards.base import GroupReward, Reward
from actors.rewards.builtin.math_answer import DeepScaleR, MathAnswer
from actors.rewards.builtin.quick import (
    contains,
    dapo,
    exact,
    exact_match,
    f1,
    final_answer,
    gpqa,
    last_number,
    length,
    random_reward,
    sandbox_check,
)
from actors.rewards.builtin.reasoning_gym import ReasoningGym
from actors.rewards.builtin.served import Judge, Remote, RewardModel
from actors.rewards.code.reward import CodeTests
from actors.rewards.instructions.reward import instructions
from actors.settings.rewards import RewardConfig
from bus.process.plugins import load_function

REWARDS: Mapping[str, Reward] = {
    "contains": contains,
    "dapo": dapo,
    "exact": exact,
    "exact_match": exact_match,
    "f1": f1,
    "final_answer": final_answer,
    "gpqa": gpqa,
    "instructions": instructions,
    "last_number": last_number,
    "length": length,
    "random": random_reward,
    "sandbox_check": sandbox_check,
}
"""Quick functions without settings."""
CONFIGURED: Mapping[str, Callable[[RewardConfig], Reward]] = {
    "code": CodeTests,
    "deepscaler": DeepScaleR,
    "judge": Judge,
    "math": MathAnswer,
    "reasoning_gym": ReasoningGym,
    "remote": Remote,
    "reward_model": RewardModel,
}
"""Rewards with processes or connections, which limit the time of a call themselves. Most open them when they
are first needed."""


def load_reward(name: str, config: RewardConfig | None = None) -> Reward:
    """Return a built-in reward or `my_pkg.my_module:function`; raises ConfigError if it cannot be loaded."""
    if name in CONFIGURED:
        return CONFIGURED[name](config or RewardConfig())
    known = {**REWARDS, **cast(Mapping[str, Reward], CONFIGURED)}
    return load_function("reward", name, known)


def load_group_reward(name: str) -> GroupReward:
    """Return the group reward `my_pkg.my_module:function`; raises ConfigError if it cannot be loaded."""
    return load_function("group reward", name, {})
