"""Settings of what is done about tokens that another policy sampled: corrections and rejections.

Loads without torch."""

from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.config.algorithm import Aggregation, SequenceMean, TokenMean
from learner.config.plugin import Choice, Picking, Plugin


def _refuse_bounds_without_effect(bound: str, floor: float | None, cap: float) -> None:
    if floor is not None and bound == "truncate":
        raise ValueError(f"floor={floor} has no effect with bound=truncate: set bound=clip or bound=mask")
    lowest = 1 / cap if floor is None else floor
    if bound != "truncate" and lowest > cap:
        raise ValueError(f"no weight is between the floor, {lowest}, and the cap, {cap}: lower the floor")


class Correction(Choice):
    """Base of the corrections. The function takes log ratios [N], the sequence of each token [N] and the
    settings, and returns weights [N], which tokens are kept [N], and what to log, as losses do."""

    by_sequence: ClassVar[bool] = True
    """The weight of a token depends on other tokens of its sequence."""

    @property
    def may_reject(self) -> bool:
        """Tell whether the correction may leave tokens out, besides weighing them."""
        return True

    @property
    def is_whole_ratio(self) -> bool:
        """Tell whether tokens are weighed by the whole importance ratio, without a cap."""
        return False


class AutoCorrection(Config):
    """Token TIS: at its default, or without a cap beside a rejection whose paper has none. None for a loss
    whose own ratio is to the policy that sampled."""

    type: Literal["auto"] = "auto"


class NoCorrection(Correction):
    """Every token counts as if the policy of the loss had sampled it."""

    type: Literal["none"] = "none"
    computed_by: ClassVar[str] = "learner.algorithms.corrections:uncorrected"
    by_sequence: ClassVar[bool] = False

    @property
    def may_reject(self) -> bool:
        return False


class TokenTIS(Correction):
    """Importance weight of each token, truncated from above (truncated importance sampling)."""

    type: Literal["token_tis"] = "token_tis"
    computed_by: ClassVar[str] = "learner.algorithms.corrections:token_tis"
    by_sequence: ClassVar[bool] = False
    truncation_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance weight to the behaviour policy; `inf` turns truncation off."""
    bound: Literal["truncate", "clip", "mask"] = "truncate"
    """`truncate` cuts weights off at the cap, `clip` also at the floor; `mask` leaves out tokens beyond
    either."""
    floor: float | None = Field(None, ge=0)
    """Lower bound on the weight with `clip` and `mask`; `None` is 1 / cap."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        _refuse_bounds_without_effect(self.bound, self.floor, self.truncation_cap)
        return self

    @property
    def may_reject(self) -> bool:
        return self.bound == "mask"

    @property
    def is_whole_ratio(self) -> bool:
        return self.truncation_cap == inf


class SequenceTIS(Correction):
    """Importance weight of each sequence, shared by its tokens and truncated from above. It needs all tokens
    of a sequence before any gradient, so the logits are computed twice."""

    type: Literal["sequence_tis"] = "sequence_tis"
    computed_by: ClassVar[str] = "learner.algorithms.corrections:sequence_tis"
    over: Literal["product", "mean"] = "product"
    """The product of the tokens' ratios, which is exact, or their geometric mean, which varies less."""
    sequence_cap: float = Field(2.0, gt=0)
    """Upper bound on the importance weight to the behaviour policy; `inf` turns truncation off."""
    bound: Literal["truncate", "clip", "mask"] = "truncate"
    """`truncate` cuts weights off at the cap, `clip` also at the floor; `mask` leaves out tokens beyond
    either."""
    floor: float | None = Field(None, ge=0)
    """Lower bound on the weight with `clip` and `mask`; `None` is 1 / cap."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        _refuse_bounds_without_effect(self.bound, self.floor, self.sequence_cap)
        return self


class PluginCorrection(Plugin, Correction):
    """A correction of the user's own: `function(log_ratio, sequence, **settings) -> (weights, kept,
    sums)`."""


UsedCorrection = NoCorrection | TokenTIS | SequenceTIS | PluginCorrection
CorrectionConfig = Annotated[AutoCorrection | UsedCorrection, Field(discriminator="type")]


class NoRejection(Config):
    """No token is rejected."""

    type: Literal["none"] = "none"


class Rejection(Choice):
    """Base of the rejections. The function takes log ratios, log-probs, advantages and the sequence of each
    token, [N] each, and the settings, and returns which tokens are kept [N]; where tokens are picked over the
    update, the picked ones are left out instead."""

    by_token: ClassVar[bool] = False
    """Whether a token is kept depends on that token alone."""
    picks: ClassVar[Picking | None] = None
    """Tokens that are left out, where they are picked over a whole update."""
    whole_ratio: ClassVar[bool] = False
    """The paper weighs what is kept by the whole importance ratio, without a cap."""
    aggregation: ClassVar[Aggregation | None] = None
    """The aggregation of its paper, if that is part of what the name stands for."""
    paper: ClassVar[str] = ""
    """Name and number of the paper of these."""


class TokenRange(Rejection):
    """Tokens are rejected whose importance ratio lies outside of a range (IcePop, arXiv:2510.18855)."""

    type: Literal["token_range"] = "token_range"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:token_range"
    by_token: ClassVar[bool] = True
    whole_ratio: ClassVar[bool] = True
    aggregation: ClassVar[Aggregation | None] = SequenceMean()
    paper: ClassVar[str] = "IcePop (arXiv:2510.18855)"
    lowest: float = Field(0.5, ge=0)
    """Smallest ratio that is trained on."""
    highest: float = Field(5.0, gt=0)
    """Largest ratio that is trained on; `inf` sets no bound."""


class BinaryTV(Rejection):
    """Tokens are rejected whose probability moved too far in the direction of their advantage (DPPO-TV,
    arXiv:2602.04879)."""

    type: Literal["binary_tv"] = "binary_tv"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:binary_tv"
    by_token: ClassVar[bool] = True
    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "DPPO (arXiv:2602.04879)"
    largest_change: float = Field(0.2, gt=0, lt=1)
    """Largest change of a token's probability that is trained on."""


class BinaryKL(Rejection):
    """Tokens are rejected that moved too far in nats in the direction of their advantage (DPPO-KL,
    arXiv:2602.04879)."""

    type: Literal["binary_kl"] = "binary_kl"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:binary_kl"
    by_token: ClassVar[bool] = True
    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "DPPO (arXiv:2602.04879)"
    largest_kl: float = Field(0.05, gt=0)
    """Largest KL in nats, between taking the token or not, that is trained on."""


class BinaryKLTwoWay(Rejection):
    """Tokens are rejected whose probability differs by too many nats from what it was, in either direction
    and whatever their advantage (KPop, ringtech.notion.site/kpop)."""

    type: Literal["binary_kl_two_way"] = "binary_kl_two_way"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:binary_kl_two_way"
    by_token: ClassVar[bool] = True
    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "KPop (ringtech.notion.site/kpop)"
    largest_kl_either_way: float = Field(0.1, gt=0)
    """Largest KL in nats, between taking the token or not, that is trained on: that of the policies in either
    order."""


class SecondMoment(Rejection):
    """Tokens with the largest log ratios of an update are rejected until the mean square of the others is
    small (M2PO, arXiv:2510.01161).

    The ratio is that of the policy before the step, whose log-probs take a pass of their own."""

    type: Literal["second_moment"] = "second_moment"
    by_token: ClassVar[bool] = True
    picks: ClassVar[Picking | None] = Picking(
        "beyond_second_moment", "learner.algorithms.selection:second_moment", ("largest_moment",)
    )
    whole_ratio: ClassVar[bool] = True
    aggregation: ClassVar[Aggregation | None] = TokenMean()
    paper: ClassVar[str] = "M2PO (arXiv:2510.01161)"
    largest_moment: float = Field(0.04, gt=0)
    """Largest mean of the squared log ratios of what is trained on, in nats squared."""


class SequenceRange(Rejection):
    """Sequences are rejected whose importance ratio lies outside of a range: geometric rejection, or, with
    `over = "product"` and sequence TIS, masked importance sampling."""

    type: Literal["sequence_range"] = "sequence_range"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:sequence_range"
    over: Literal["product", "mean"] = "mean"
    """The product of the tokens' ratios, or their geometric mean."""
    lowest_of_sequence: float = Field(0.99, ge=0)
    """Smallest ratio that is trained on."""
    highest_of_sequence: float = Field(1.01, gt=0)
    """Largest ratio that is trained on; `inf` sets no bound."""


class Veto(Rejection):
    """Sequences are rejected in which a token has become nearly impossible."""

    type: Literal["veto"] = "veto"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:veto"
    smallest: float = Field(1e-4, gt=0, lt=1)
    """Smallest ratio of any token of a sequence that is trained on."""


class NegativeDivergence(Rejection):
    """Sequences of negative advantage are rejected that have become less likely (off-policy sequence masking
    of DeepSeek-V3.2, arXiv:2512.02556)."""

    type: Literal["negative_divergence"] = "negative_divergence"
    computed_by: ClassVar[str] = "learner.algorithms.rejections:negative_divergence"
    largest_drop: float = Field(1e-4, gt=0)
    """Largest mean drop of the log-probs, in nats a token, that is trained on."""


UsedRejection = (
    TokenRange
    | BinaryTV
    | BinaryKL
    | BinaryKLTwoWay
    | SecondMoment
    | SequenceRange
    | Veto
    | NegativeDivergence
)
RejectionConfig = Annotated[NoRejection | UsedRejection, Field(discriminator="type")]


def refuse_two_selections(rejections: Sequence[Rejection]) -> None:
    """Raise `ValueError` for two that pick tokens over an update alike: there is one mark for each token."""
    picking = [one for one in rejections if one.picks is not None]
    for one, other in combinations(picking, 2):
        if one.picks == other.picks:
            raise ValueError(
                f"learner.rejections: {one.type} is there twice, {one!r} and {other!r}: what the strictest "
                "leaves out is all that any does: keep that one"
            )
