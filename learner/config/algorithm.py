"""Settings of the algorithm. Loads without torch.

Each is a choice of its own, discriminated on `type`; `type = "plugin"` names a function of the user's.
Advantage and aggregation are here; the losses are in loss.py, corrections and rejections in correction.py.
"""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config
from learner.config.plugin import Plugin


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
