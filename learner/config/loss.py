"""Settings of the loss of each token, and what the rest of the objective goes by. Loads without torch."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from learner.config.algorithm import SEQUENCE_SUM, Aggregation, SequenceMean, TokenMean
from learner.config.plugin import Choice, Picking, Plugin

ProximalSource = Literal["auto", "recomputed", "first_pass", "interpolated"]
PreferenceForm = Literal["sigmoid", "hinge", "ipo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFacts:
    """What others go by about a loss. The defaults are what is right for a loss that states nothing: it is
    corrected, and sees whole sequences."""

    own_ratio: bool = False
    """The loss weighs by the ratio to the policy that sampled, or wants no weight: no correction is left."""
    by_sequence: bool = True
    """The loss of a token depends on other tokens of its sequence."""
    zero_without_advantage: bool = False
    """The tokens of a sequence whose advantages are all 0 have neither a loss nor a gradient."""
    aggregation: Aggregation | None = None
    """The aggregation of its paper; None where the paper has several or the loss is not from one paper."""
    paper: str = ""
    """Name and number of the paper that the aggregation is from."""
    proximal: ProximalSource | None = None
    """The loss is centred on the policy before the step, whose log-probs come from there: the setting
    `proximal`. None for a loss that is not."""
    picks: Picking | None = None
    """Tokens that the loss treats apart, if there are such."""
    of_samples: bool = True
    """The tokens were sampled by a policy, whose log-probs the current ones are compared with."""
    of_pairs: bool = False
    """The loss compares two answers to a prompt, of which the first is preferred."""
    to_reference: bool = False
    """The loss compares the policy with the weights that the run begins with."""
    of_scores: bool = False
    """The model gives an answer one number, after its last token, in place of log-probs."""


OF_SEQUENCES = LossFacts(own_ratio=True, zero_without_advantage=True)
"""Facts of a policy gradient whose ratio is that of a sequence to the policy that sampled it."""
OF_TOKENS = replace(OF_SEQUENCES, by_sequence=False)
"""Facts of a policy gradient in which each token has a ratio of its own."""


class Loss(Choice):
    """Base of the losses, which states nothing. The function takes tokens
    (`learner.algorithms.tokens.LossTokens`) and the settings, and returns the losses of the tokens [N] and
    what to log: sums [], or which tokens are counted [N]."""

    stated: ClassVar[LossFacts] = LossFacts()
    """What is true of the loss under all settings."""

    @property
    def facts(self) -> LossFacts:
        return self.stated


class ReinforceLoss(Loss):
    """Policy gradient without a clip; with `correction.type = "token_tis"`, the default, it is token-level
    truncated importance sampling (IMPALA's policy gradient, arXiv:1802.01561)."""

    type: Literal["reinforce"] = "reinforce"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:reinforce_loss"
    stated: ClassVar[LossFacts] = LossFacts(by_sequence=False, zero_without_advantage=True)


class PPOClipLoss(Loss):
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    computed_by: ClassVar[str] = "learner.algorithms.losses.clipped:ppo_clip_loss"
    read_elsewhere: ClassVar[tuple[str, ...]] = ("proximal",)
    stated: ClassVar[LossFacts] = LossFacts(by_sequence=False, zero_without_advantage=True)
    centre: Literal["behaviour", "proximal"] = "behaviour"
    """Centre of the clip: the policy that sampled the token, or, decoupled (arXiv:2505.24298), the policy
    before the step, whose log-probs take a pass of their own. The latter is for `batch.updates` above 1: in
    the first update the policy is still at the centre."""
    clip_eps: float = Field(0.2, gt=0)
    """Sets how far below 1 the importance ratio may fall before its gradient stops."""
    clip_eps_high: float | None = Field(None, gt=0)
    """Sets how far above 1 it may rise (arXiv:2503.14476); `None` means `clip_eps`."""
    proximal: ProximalSource = "auto"
    """Where a proximal centre's log-probs come from. `recomputed`: a pass before the step. `first_pass`: the
    policy as it is trained, which with `batch.updates` of 1 is the one before the step. `interpolated`: the
    log-probs then and now weighed by 1 / d and 1 - 1 / d, at a staleness of d versions (A-3PO,
    arXiv:2512.06547). `auto`: `recomputed` where `batch.updates` is above 1, else `first_pass`."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token of negative advantage has no gradient either (arXiv:1912.09729, where it is
    3); `None` sets no bound."""

    @property
    def facts(self) -> LossFacts:
        """Return facts of the loss: with a proximal centre its ratio is not to the policy that sampled."""
        if self.centre == "behaviour":
            return replace(self.stated, own_ratio=True)
        return replace(self.stated, proximal=self.proximal)

    @model_validator(mode="after")
    def _proximal_is_used(self) -> Self:
        if self.centre == "behaviour" and self.proximal != "auto":
            raise ValueError(
                f"proximal={self.proximal} has no effect with centre=behaviour: set centre=proximal"
            )
        return self


class GSPOLoss(Loss):
    """Clipped surrogate whose importance ratio is that of the sequence (arXiv:2507.18071, eq. 5 to 7). Its
    ratio needs all tokens of a sequence before any gradient, so the logits are computed twice."""

    type: Literal["gspo"] = "gspo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.clipped:gspo_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_SEQUENCES, aggregation=SequenceMean(), paper="GSPO (arXiv:2507.18071, eq. 5)"
    )
    sequence_clip_eps: float = Field(3e-4, gt=0)
    """Sets how far below 1 the sequence's ratio may fall before its gradient stops."""
    sequence_clip_eps_high: float | None = Field(4e-4, gt=0)
    """Sets how far above 1 it may rise; `None` means `sequence_clip_eps`."""


class CISPOLoss(Loss):
    """Policy gradient weighed by the clipped importance ratio; every token keeps a gradient
    (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:cispo_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_TOKENS, aggregation=TokenMean(), paper="CISPO (arXiv:2506.13585, eq. 4)"
    )
    lowest_weight: float = Field(0.0, ge=0, le=1)
    """Lower bound on the weight: 1 - epsilon low of the paper."""
    highest_weight: float = Field(5.0, ge=1)
    """Upper bound on the weight: 1 + epsilon high of the paper."""


class SAPOLoss(Loss):
    """Policy gradient with a soft gate in place of a clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:sapo_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_TOKENS, aggregation=SequenceMean(), paper="SAPO (arXiv:2511.20347)"
    )
    temperature: float = Field(1.0, gt=0)
    """Sets how fast the gate falls off for tokens of positive advantage."""
    temperature_negative: float = Field(1.05, gt=0)
    """Sets how fast it does for those of negative advantage."""


class TOPRLoss(Loss):
    """Policy gradient in which only sequences of negative advantage are weighed, by their ratio, at most 1
    (arXiv:2503.14286).

    Its ratio needs all tokens of a sequence before any gradient, so the logits are computed twice."""

    type: Literal["topr"] = "topr"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:topr_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_SEQUENCES, aggregation=SEQUENCE_SUM, paper="TOPR (arXiv:2503.14286, eq. 8)"
    )


class AIPOLoss(Loss):
    """Policy gradient weighed by the importance ratio, cut off from above (AIPO of LlamaRL,
    arXiv:2505.24034)."""

    type: Literal["aipo"] = "aipo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:aipo_loss"
    stated: ClassVar[LossFacts] = OF_TOKENS
    ratio_cap: float = Field(5.0, gt=0)
    """Upper bound on the weight; the paper has 2 to 10."""


class GMPOLoss(Loss):
    """Policy gradient of the geometric mean of a sequence's clipped ratios (arXiv:2507.20673). It needs all
    tokens of a sequence before any gradient, so the logits are computed twice."""

    type: Literal["gmpo"] = "gmpo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.clipped:gmpo_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_SEQUENCES, aggregation=SequenceMean(), paper="GMPO (arXiv:2507.20673)"
    )
    log_clip: float = Field(0.4, gt=0)
    """Sets how many nats a token's log ratio may fall below 0 before its gradient stops."""
    log_clip_high: float | None = Field(None, gt=0)
    """Sets how many nats it may rise above 0; `None` means `log_clip`."""


class VESPOLoss(Loss):
    """Policy gradient weighed by W^power exp(decay (1 - W)) of the sequence's ratio W (arXiv:2602.10693).

    The defaults are those of the authors' code. Its ratio needs all tokens of a sequence before any gradient,
    so the logits are computed twice."""

    type: Literal["vespo"] = "vespo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:vespo_loss"
    stated: ClassVar[LossFacts] = replace(
        OF_SEQUENCES, aggregation=TokenMean(), paper="VESPO (arXiv:2602.10693)"
    )
    power: float = Field(2.0, ge=0)
    """Sets how fast the weight falls off where the ratio is small."""
    decay: float = Field(3.0, ge=0)
    """Sets how fast it falls off where the ratio is large."""
    power_negative: float = Field(3.0, ge=0)
    """The power of tokens of negative advantage."""
    decay_negative: float = Field(2.0, ge=0)
    """The decay of tokens of negative advantage."""


class RegressionLoss(Loss):
    """Squared distance of a sequence's log ratio from its advantage, without any importance weight (Kimi
    k1.5, arXiv:2501.12599, 2.3.2; A*-PO, arXiv:2505.20686).

    Kimi's advantage is `grpo` with `normalize_std = false`. It needs all tokens of a sequence before any
    gradient, so the logits are computed twice."""

    type: Literal["regression"] = "regression"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:regression_loss"
    stated: ClassVar[LossFacts] = LossFacts(
        own_ratio=True, aggregation=SEQUENCE_SUM, paper="Kimi k1.5 (arXiv:2501.12599, 2.3.2)"
    )
    kl_weight: float = Field(0.1, gt=0)
    """Advantage that a sequence's log ratio of 1 nat amounts to: a larger one keeps the policy nearer to the
    one that sampled."""


CLIP_COV = Picking(
    "picked_by_covariance",
    "learner.algorithms.selection:clip_cov",
    ("picked_fraction", "lowest_covariance", "highest_covariance"),
)
KL_COV = Picking("picked_by_covariance", "learner.algorithms.selection:kl_cov", ("picked_fraction",))


class ClipCovLoss(Loss):
    """PPO's clipped surrogate without the gradient of some tokens whose covariance is high (Clip-Cov,
    arXiv:2505.22617).

    The covariance is that of advantages and log-probs over the update; the log-probs are those of the policy
    before the step, which take a pass of their own."""

    type: Literal["clip_cov"] = "clip_cov"
    computed_by: ClassVar[str] = "learner.algorithms.losses.clipped:clip_cov_loss"
    read_elsewhere: ClassVar[tuple[str, ...]] = CLIP_COV.settings
    stated: ClassVar[LossFacts] = replace(
        OF_TOKENS, aggregation=TokenMean(), paper="Clip-Cov (arXiv:2505.22617)", picks=CLIP_COV
    )
    picked_fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the update's tokens that is picked, one token at least."""
    clip_eps: float = Field(0.2, gt=0)
    """Sets how far below 1 the importance ratio may fall before its gradient stops."""
    clip_eps_high: float | None = Field(None, gt=0)
    """Sets how far above 1 it may rise (arXiv:2503.14476); `None` means `clip_eps`."""
    lowest_covariance: float = 1.0
    """Tokens are picked at random among those whose covariance is above this."""
    highest_covariance: float = 5.0
    """Tokens are picked among those whose covariance is below this."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.lowest_covariance >= self.highest_covariance:
            raise ValueError(
                f"lowest_covariance={self.lowest_covariance} leaves no token below highest_covariance="
                f"{self.highest_covariance}: lower the first"
            )
        return self


class KLCovLoss(Loss):
    """Unclipped surrogate with a penalty that keeps the tokens of highest covariance near the policy that
    sampled them (KL-Cov, arXiv:2505.22617).

    The covariance is that of `clip_cov`, and takes the same pass."""

    type: Literal["kl_cov"] = "kl_cov"
    computed_by: ClassVar[str] = "learner.algorithms.losses.clipped:kl_cov_loss"
    read_elsewhere: ClassVar[tuple[str, ...]] = KL_COV.settings
    stated: ClassVar[LossFacts] = LossFacts(
        own_ratio=True,
        by_sequence=False,
        aggregation=TokenMean(),
        paper="KL-Cov (arXiv:2505.22617)",
        picks=KL_COV,
    )
    picked_fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the update's tokens that is picked, one token at least."""
    picked_kl_coef: float = Field(1.0, gt=0)
    """Weight of a picked token's distance from the policy that sampled it, per nat."""


class PluginLoss(Plugin, Loss):
    """A loss of the user's own: `function(tokens, **settings) -> ([N], sums)`, with
    `learner.algorithms.tokens.LossTokens`."""

    separable: bool = True
    """Sets whether the loss of each token depends on that token alone. Otherwise the function sees all tokens
    of a micro-batch at once, and the logits are computed twice."""
    sampled_by: Literal["behaviour", "current"] = "current"
    """The policy that the loss takes its tokens to come from: the correction weighs by the ratio of that
    policy to the one that sampled them."""

    @property
    def facts(self) -> LossFacts:
        return LossFacts(own_ratio=self.sampled_by == "behaviour", by_sequence=not self.separable)


class SFTLoss(Loss):
    """Supervised fine-tuning: negative log-likelihood of the tokens under the mask."""

    type: Literal["sft"] = "sft"
    computed_by: ClassVar[str] = "learner.algorithms.losses.policy_gradients:sft_loss"
    stated: ClassVar[LossFacts] = LossFacts(own_ratio=True, by_sequence=False, of_samples=False)


class DPOLoss(Loss):
    """Direct preference optimisation over pairs of answers (arXiv:2305.18290, eq. 7). The reference is the
    model that the run begins with."""

    type: Literal["dpo"] = "dpo"
    computed_by: ClassVar[str] = "learner.algorithms.losses.preference:dpo_loss"
    stated: ClassVar[LossFacts] = LossFacts(
        own_ratio=True, of_samples=False, of_pairs=True, to_reference=True
    )
    beta: float = Field(0.1, gt=0)
    """Reward of a nat by which an answer is likelier than under the reference."""
    form: PreferenceForm = "sigmoid"
    """What becomes of the difference of two rewards: `sigmoid` is the paper's, `hinge` SLiC's
    (arXiv:2305.10425), `ipo` a square of mean log ratios (arXiv:2310.12036)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose preference is taken to be wrong."""

    @model_validator(mode="after")
    def _smoothing_is_used(self) -> Self:
        if self.label_smoothing and self.form != "sigmoid":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no effect with form={self.form}: set it to 0, "
                "or form=sigmoid"
            )
        return self


class RewardModelLoss(Loss):
    """Bradley-Terry loss of a reward model over pairs of answers (arXiv:1706.03741, eq. 1). The model gets a
    scalar head in place of its output layer."""

    type: Literal["reward_model"] = "reward_model"
    computed_by: ClassVar[str] = "learner.algorithms.losses.preference:bradley_terry_loss"
    stated: ClassVar[LossFacts] = LossFacts(own_ratio=True, of_samples=False, of_pairs=True, of_scores=True)


SupervisedLoss = Annotated[SFTLoss | DPOLoss | RewardModelLoss, Field(discriminator="type")]
UsedLoss = (
    ReinforceLoss
    | PPOClipLoss
    | GSPOLoss
    | CISPOLoss
    | SAPOLoss
    | TOPRLoss
    | AIPOLoss
    | GMPOLoss
    | VESPOLoss
    | RegressionLoss
    | ClipCovLoss
    | KLCovLoss
    | PluginLoss
)
LossConfig = Annotated[UsedLoss, Field(discriminator="type")]
