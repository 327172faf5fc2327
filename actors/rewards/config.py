"""Settings of rewards, for every environment that scores answers. Loads without torch."""

from pydantic import Field

from bus.config import Config


class RewardConfig(Config):
    """Which reward scores the answers of a run, and how."""

    reward: str = "exact"
    """Name of a built-in reward, or a function of your own as `my_pkg.my_module:function`."""

    reward_timeout_s: float = Field(30.0, gt=0)
    """Longest time that one call of the reward may take before the rollout counts as failed."""

    reward_threads: int = Field(16, ge=1)
    """Threads in which a plain (not async) reward of your own is called; 1 for one that only one thread may
    call at a time."""
