"""Settings of the objective: advantage, loss and correction. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config


class TISLoss(Config):
    """Token-level REINFORCE with a truncated importance ratio."""

    type: Literal["tis"] = "tis"
    """Name of the loss."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance ratio to the behaviour policy; `inf` turns truncation off."""


class PPOClipLoss(Config):
    """PPO's clipped surrogate."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""

    centre: Literal["behaviour", "proximal"] = "behaviour"
    """Centre of the clip: the policy that sampled the token, or, decoupled (arXiv:2505.24298), the policy
    before the step, whose log-probs take a pass of their own. The latter is for `batch.updates` above 1: in
    the first update the policy is still at the centre."""

    clip_eps: float = Field(0.2, gt=0)
    """How far below 1 the importance ratio may fall before its gradient stops."""

    clip_eps_high: float | None = Field(None, gt=0)
    """How far above 1 it may rise; `None` means `clip_eps`."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance ratio to the behaviour policy; `inf` turns truncation off."""


class SFTLoss(Config):
    """Supervised fine-tuning: negative log-likelihood of the tokens under the mask."""

    type: Literal["sft"] = "sft"
    """Name of the loss."""


LossConfig = Annotated[TISLoss | PPOClipLoss, Field(discriminator="type")]


class GRPOAdvantage(Config):
    """Reward relative to the agent's other rewards in its group."""

    type: Literal["grpo"] = "grpo"
    """Name of the estimator."""

    normalize_std: bool = True
    """Divide by the standard deviation of the agent's rewards in the group. `False` only removes the mean, as
    Dr. GRPO (arXiv:2503.20783) does; that also divides the loss by a constant instead of by lengths."""

    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""


class PluginAdvantage(Config):
    """A function of the user's own."""

    type: Literal["plugin"]
    """Name of the estimator."""

    function: str
    """`my_pkg.my_module:function`, from groups of trajectories to an advantage for each trajectory: a number,
    or one for each of its tokens."""


AdvantageConfig = Annotated[GRPOAdvantage | PluginAdvantage, Field(discriminator="type")]
