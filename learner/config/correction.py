"""Settings of what is done about tokens that another policy sampled: corrections and rejections.

Loads without torch."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.config.algorithm import SequenceMean, TokenMean, UsedAggregation
from learner.config.plugin import Plugin


def _refuse_bounds_without_effect(bound: str, floor: float | None, cap: float) -> None:
    if floor is not None and bound == "truncate":
        raise ValueError(f"floor={floor} has no effect with bound=truncate: set bound=clip or bound=mask")
    lowest = 1 / cap if floor is None else floor
    if bound != "truncate" and lowest > cap:
        raise ValueError(f"no weight is between the floor, {lowest}, and the cap, {cap}: lower the floor")


class AutoCorrection(Config):
    """Token TIS: at its default, or without a cap beside a rejection whose paper has none. None for a loss
    whose own ratio is to the policy that sampled."""

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

    bound: Literal["truncate", "clip", "mask"] = "truncate"
    """`truncate` cuts weights off at the cap, `clip` also at the floor; `mask` leaves out tokens beyond
    either."""

    floor: float | None = Field(None, ge=0)
    """Lower bound on the weight with `clip` and `mask`; `None` is 1 / cap."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        _refuse_bounds_without_effect(self.bound, self.floor, self.truncation_cap)
        return self


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

    bound: Literal["truncate", "clip", "mask"] = "truncate"
    """`truncate` cuts weights off at the cap, `clip` also at the floor; `mask` leaves out tokens beyond
    either."""

    floor: float | None = Field(None, ge=0)
    """Lower bound on the weight with `clip` and `mask`; `None` is 1 / cap."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        _refuse_bounds_without_effect(self.bound, self.floor, self.sequence_cap)
        return self


UsedCorrection = NoCorrection | TokenTIS | SequenceTIS | Plugin
CorrectionConfig = Annotated[AutoCorrection | UsedCorrection, Field(discriminator="type")]


class NoRejection(Config):
    """No token is rejected."""

    type: Literal["none"] = "none"
    """Name of the rejection."""


class _Rejection(Config):
    """Base of the rejections, with what is not a setting of theirs."""

    whole_ratio: ClassVar[bool] = False
    """Its paper weighs what is kept by the whole importance ratio, without a cap."""

    aggregation: ClassVar[UsedAggregation | None] = None
    """The aggregation of its paper, if that is part of what the name stands for."""

    paper: ClassVar[str] = ""
    """Name and number of the paper of these."""


class TokenRange(_Rejection):
    """Tokens are rejected whose importance ratio lies outside of a range (IcePop, arXiv:2510.18855)."""

    type: Literal["token_range"] = "token_range"
    """Name of the rejection."""

    whole_ratio: ClassVar[bool] = True
    aggregation: ClassVar[UsedAggregation | None] = SequenceMean()
    paper: ClassVar[str] = "IcePop (arXiv:2510.18855)"

    lowest: float = Field(0.5, ge=0)
    """Smallest ratio that is trained on."""

    highest: float = Field(5.0, gt=0)
    """Largest ratio that is trained on; `inf` sets no bound."""


class BinaryTV(_Rejection):
    """Tokens are rejected whose probability moved too far in the direction of their advantage (DPPO-TV,
    arXiv:2602.04879)."""

    type: Literal["binary_tv"] = "binary_tv"
    """Name of the rejection."""

    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "DPPO (arXiv:2602.04879)"

    largest_change: float = Field(0.2, gt=0, lt=1)
    """Largest change of a token's probability that is trained on."""


class BinaryKL(_Rejection):
    """Tokens are rejected that moved too far in nats in the direction of their advantage (DPPO-KL,
    arXiv:2602.04879)."""

    type: Literal["binary_kl"] = "binary_kl"
    """Name of the rejection."""

    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "DPPO (arXiv:2602.04879)"

    largest_kl: float = Field(0.05, gt=0)
    """Largest KL in nats, between taking the token or not, that is trained on."""


class BinaryKLTwoWay(_Rejection):
    """Tokens are rejected whose probability differs by too many nats from what it was, in either direction
    and whatever their advantage (KPop, ringtech.notion.site/kpop)."""

    type: Literal["binary_kl_two_way"] = "binary_kl_two_way"
    """Name of the rejection."""

    whole_ratio: ClassVar[bool] = True
    paper: ClassVar[str] = "KPop (ringtech.notion.site/kpop)"

    largest_kl_either_way: float = Field(0.1, gt=0)
    """Largest KL in nats, between taking the token or not, that is trained on: that of the policies in either
    order."""


class SecondMoment(_Rejection):
    """Tokens with the largest log ratios of an update are rejected until the mean square of the others is
    small (M2PO, arXiv:2510.01161).

    The ratio is that of the policy before the step, whose log-probs take a pass of their own.
    """

    type: Literal["second_moment"] = "second_moment"
    """Name of the rejection."""

    whole_ratio: ClassVar[bool] = True
    aggregation: ClassVar[UsedAggregation | None] = TokenMean()
    paper: ClassVar[str] = "M2PO (arXiv:2510.01161)"

    largest_moment: float = Field(0.04, gt=0)
    """Largest mean of the squared log ratios of what is trained on, in nats squared."""


class SequenceRange(_Rejection):
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


class Veto(_Rejection):
    """Sequences are rejected in which a token has become nearly impossible."""

    type: Literal["veto"] = "veto"
    """Name of the rejection."""

    smallest: float = Field(1e-4, gt=0, lt=1)
    """Smallest ratio of any token of a sequence that is trained on."""


class NegativeDivergence(_Rejection):
    """Sequences of negative advantage are rejected that have become less likely (off-policy sequence masking
    of DeepSeek-V3.2, arXiv:2512.02556)."""

    type: Literal["negative_divergence"] = "negative_divergence"
    """Name of the rejection."""

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


def refuse_two_selections(rejections: Sequence[UsedRejection]) -> None:
    """Raise `ValueError` for two that pick tokens over an update alike: there is one mark for each token."""
    bounds = [rejection.largest_moment for rejection in rejections if isinstance(rejection, SecondMoment)]
    if len(bounds) > 1:
        raise ValueError(
            f"learner.rejections: second_moment is there {len(bounds)} times, with largest_moment {bounds}: "
            "what the smallest leaves out is all that any does: keep that one"
        )
