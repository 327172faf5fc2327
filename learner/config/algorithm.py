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
    """Reward relative to its group."""

    type: Literal["grpo"] = "grpo"
    """Name of the estimator."""

    normalize_std: bool = True
    """Divide by the group's standard deviation; `False` is Dr. GRPO."""

    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""


AdvantageConfig = GRPOAdvantage
"""A union discriminated on `type` as soon as there is a second estimator."""
