"""Settings of the loss of each token. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config
from learner.config.plugin import Plugin


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

    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token of negative advantage has no gradient either (arXiv:1912.09729, where it is
    3); `None` sets no bound."""


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


class CISPOLoss(Config):
    """Policy gradient weighed by the clipped importance ratio; every token keeps a gradient
    (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""

    lowest_weight: float = Field(0.0, ge=0, le=1)
    """Lower bound on the weight: 1 - epsilon low of the paper."""

    highest_weight: float = Field(5.0, ge=1)
    """Upper bound on the weight: 1 + epsilon high of the paper."""


class SAPOLoss(Config):
    """Policy gradient with a soft gate in place of a clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    """Name of the loss."""

    temperature: float = Field(1.0, gt=0)
    """Sets how fast the gate falls off for tokens of positive advantage."""

    temperature_negative: float = Field(1.05, gt=0)
    """Sets how fast it does for those of negative advantage."""


class TOPRLoss(Config):
    """Policy gradient in which only sequences of negative advantage are weighed, by their ratio, at most 1
    (arXiv:2503.14286).

    Its ratio needs all tokens of a sequence before any gradient, so the logits are computed twice.
    """

    type: Literal["topr"] = "topr"
    """Name of the loss."""


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


UsedLoss = ReinforceLoss | PPOClipLoss | GSPOLoss | CISPOLoss | SAPOLoss | TOPRLoss | PluginLoss
LossConfig = Annotated[UsedLoss, Field(discriminator="type")]
