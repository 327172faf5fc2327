"""Settings of the algorithm: correction, rejection, loss and aggregation. Loads without torch.

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


class SequenceTIS(Config):
    """Importance weight of each sequence, shared by its tokens and truncated from above.

    It needs all tokens of a sequence before any gradient, so the logits are computed twice.
    """

    type: Literal["sequence_tis"] = "sequence_tis"
    """Name of the correction."""

    over: Literal["product", "mean"] = "product"
    """The product of the tokens' ratios, which is exact, or their geometric mean, which varies less."""

    sequence_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance weight to the behaviour policy; `inf` turns truncation off."""


UsedCorrection = NoCorrection | TokenTIS | SequenceTIS | Plugin
CorrectionConfig = Annotated[AutoCorrection | UsedCorrection, Field(discriminator="type")]


class NoRejection(Config):
    """No token is rejected."""

    type: Literal["none"] = "none"
    """Name of the rejection."""


class TokenRange(Config):
    """Tokens are rejected whose importance ratio lies outside of a range (IcePop, arXiv:2510.18855)."""

    type: Literal["token_range"] = "token_range"
    """Name of the rejection."""

    lowest: float = Field(0.5, ge=0)
    """Smallest ratio that is trained on."""

    highest: float = Field(5.0, gt=0)
    """Largest ratio that is trained on; `inf` sets no bound."""


class BinaryTV(Config):
    """Tokens are rejected whose probability moved too far in the direction of their advantage (DPPO-TV)."""

    type: Literal["binary_tv"] = "binary_tv"
    """Name of the rejection."""

    largest_change: float = Field(0.2, gt=0, lt=1)
    """Largest change of a token's probability that is trained on."""


class BinaryKL(Config):
    """Tokens are rejected that moved too far in nats in the direction of their advantage (DPPO-KL)."""

    type: Literal["binary_kl"] = "binary_kl"
    """Name of the rejection."""

    largest_kl: float = Field(0.05, gt=0)
    """Largest KL in nats, between taking the token or not, that is trained on."""


class SequenceRange(Config):
    """Sequences are rejected whose importance ratio lies outside of a range: geometric rejection, or, with
    `over = "product"` and sequence TIS, masked importance sampling."""

    type: Literal["sequence_range"] = "sequence_range"
    """Name of the rejection."""

    over: Literal["product", "mean"] = "mean"
    """The product of the tokens' ratios, or their geometric mean."""

    lowest_of_sequence: float = Field(0.99, ge=0)
    """Smallest ratio that is trained on."""

    highest_of_sequence: float = Field(1.01, gt=0)
    """Largest ratio that is trained on; `inf` sets no bound."""


class Veto(Config):
    """Sequences are rejected in which a token has become nearly impossible."""

    type: Literal["veto"] = "veto"
    """Name of the rejection."""

    smallest: float = Field(1e-4, gt=0, lt=1)
    """Smallest ratio of any token of a sequence that is trained on."""


class NegativeDivergence(Config):
    """Sequences of negative advantage are rejected that have become less likely (off-policy sequence masking
    of DeepSeek-V3.2, arXiv:2512.02556)."""

    type: Literal["negative_divergence"] = "negative_divergence"
    """Name of the rejection."""

    largest_drop: float = Field(1e-4, gt=0)
    """Largest mean drop of the log-probs, in nats a token, that is trained on."""


RejectionConfig = Annotated[
    NoRejection | TokenRange | BinaryTV | BinaryKL | SequenceRange | Veto | NegativeDivergence,
    Field(discriminator="type"),
]


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
