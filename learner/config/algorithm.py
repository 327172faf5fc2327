"""Settings of the algorithm: advantage, correction, loss and aggregation. Loads without torch.

Each is a choice of its own, discriminated on `type`; `type = "plugin"` names a function of the user's.
"""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config


class Plugin(Config):
    """A function of the user's own, with the signature of the built-in ones."""

    type: Literal["plugin"] = "plugin"
    """Name of the choice."""

    function: str
    """The function, as `my_pkg.my_module:function`; the working directory counts."""

    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Keyword arguments that the function gets besides."""


class ReinforceLoss(Config):
    """Policy gradient without a clip; with `correction.type = "token_tis"`, the default, it is token-level
    truncated importance sampling (IMPALA's policy gradient, arXiv:1802.01561)."""

    type: Literal["reinforce"] = "reinforce"
    """Name of the loss."""


class PPOClipLoss(Config):
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Name of the loss."""

    centre: Literal["behaviour", "proximal"] = "behaviour"
    """Centre of the clip: the policy that sampled the token, or, decoupled (arXiv:2505.24298), the policy
    before the step, whose log-probs take a pass of their own. The latter is for `batch.updates` above 1: in
    the first update the policy is still at the centre."""

    clip_eps: float = Field(0.2, gt=0)
    """Sets how far below 1 the importance ratio may fall before its gradient stops."""

    clip_eps_high: float | None = Field(None, gt=0)
    """Sets how far above 1 it may rise (arXiv:2503.14476); `None` means `clip_eps`."""


class GSPOLoss(Config):
    """Clipped surrogate whose importance ratio is that of the sequence (arXiv:2507.18071, eq. 5 to 7).

    Its ratio needs all tokens of a sequence before any gradient, so the logits are computed twice.
    """

    type: Literal["gspo"] = "gspo"
    """Name of the loss."""

    sequence_clip_eps: float = Field(3e-4, gt=0)
    """Sets how far below 1 the sequence's ratio may fall before its gradient stops."""

    sequence_clip_eps_high: float | None = Field(4e-4, gt=0)
    """Sets how far above 1 it may rise; `None` means `sequence_clip_eps`."""


class PluginLoss(Plugin):
    """A loss of the user's own: `function(tokens, **settings) -> ([N], sums)`, with
    `learner.algorithms.tokens.LossTokens`."""

    separable: bool = True
    """Sets whether the loss of each token depends on that token alone. Otherwise the function sees all tokens
    of a micro-batch at once, and the logits are computed twice."""

    sampled_by: Literal["behaviour", "current"] = "current"
    """The policy that the loss takes its tokens to come from: the correction weighs by the ratio of that
    policy to the one that sampled them."""


class SFTLoss(Config):
    """Supervised fine-tuning: negative log-likelihood of the tokens under the mask."""

    type: Literal["sft"] = "sft"
    """Name of the loss."""


LossConfig = Annotated[ReinforceLoss | PPOClipLoss | GSPOLoss | PluginLoss, Field(discriminator="type")]


class AutoCorrection(Config):
    """Token TIS at its default, or none for a loss whose own ratio is to the policy that sampled."""

    type: Literal["auto"] = "auto"
    """Name of the correction."""


class NoCorrection(Config):
    """Every token counts as if the policy of the loss had sampled it."""

    type: Literal["none"] = "none"
    """Name of the correction."""


class TokenTIS(Config):
    """Importance weight of each token, truncated from above (truncated importance sampling)."""

    type: Literal["token_tis"] = "token_tis"
    """Name of the correction."""

    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance weight to the behaviour policy; `inf` turns truncation off."""


CorrectionConfig = Annotated[AutoCorrection | NoCorrection | TokenTIS | Plugin, Field(discriminator="type")]
UsedCorrection = NoCorrection | TokenTIS | Plugin


class GRPOAdvantage(Config):
    """Reward relative to the agent's other rewards in its group."""

    type: Literal["grpo"] = "grpo"
    """Name of the estimator."""

    normalize_std: bool = True
    """Divide by the standard deviation of the agent's rewards in the group. `False` only removes the mean, as
    Dr. GRPO (arXiv:2503.20783) does; that also divides the loss by a constant (`aggregation.type`)."""

    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""


AdvantageConfig = Annotated[GRPOAdvantage | Plugin, Field(discriminator="type")]


class TokenMean(Config):
    """Mean over all trained tokens of the step, as in DAPO (arXiv:2503.14476)."""

    type: Literal["token_mean"] = "token_mean"
    """Name of the aggregation."""


class SequenceMean(Config):
    """Mean over the trajectories of the step of the mean over their tokens, as in GRPO (arXiv:2402.03300)."""

    type: Literal["sequence_mean"] = "sequence_mean"
    """Name of the aggregation."""


class PromptMean(Config):
    """Mean over the prompts of the step of the mean over all tokens of a prompt's trajectories."""

    type: Literal["prompt_mean"] = "prompt_mean"
    """Name of the aggregation."""


class ConstantDenominator(Config):
    """Sum over the tokens of a trajectory divided by a constant, as in Dr. GRPO (arXiv:2503.20783)."""

    type: Literal["constant"] = "constant"
    """Name of the aggregation."""

    tokens: int = Field(gt=0)
    """Sets what each trajectory's sum is divided by, such as the longest answer that is allowed."""


AggregationConfig = Annotated[
    TokenMean | SequenceMean | PromptMean | ConstantDenominator | Plugin, Field(discriminator="type")
]
