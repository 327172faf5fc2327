"""Settings of the aggregation, the last choice of the algorithm. Loads without torch.

Each choice is discriminated on `type`; `type = "plugin"` names a function of the user's. The others are in
advantage.py, correction.py (with rejections) and loss.py."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from bus.config import Config
from learner.config.plugin import Choice, Plugin


class Aggregation(Choice):
    """Base of the aggregations (learner/algorithms/aggregation.py)."""

    weighs_alike: ClassVar[bool] = False
    """Every trained token of the step has weight 1, so that no stream is needed."""
    by_episode: ClassVar[bool] = False
    """The function gets the numbers of episodes in place of those of prompts."""


class AutoAggregation(Config):
    """The aggregation of the paper that the loss or a rejection is from, or the mean over tokens."""

    type: Literal["auto"] = "auto"


class TokenMean(Aggregation):
    """Mean over all trained tokens of the step, as in DAPO (arXiv:2503.14476)."""

    type: Literal["token_mean"] = "token_mean"
    computed_by: ClassVar[str] = "learner.algorithms.aggregation:token_mean"
    weighs_alike: ClassVar[bool] = True


class SequenceMean(Aggregation):
    """Mean over the trajectories of the step of the mean over their tokens, as in GRPO (arXiv:2402.03300)."""

    type: Literal["sequence_mean"] = "sequence_mean"
    computed_by: ClassVar[str] = "learner.algorithms.aggregation:sequence_mean"


class PromptMean(Aggregation):
    """Mean over the prompts of the step of the mean over all tokens of a prompt's trajectories."""

    type: Literal["prompt_mean"] = "prompt_mean"
    computed_by: ClassVar[str] = "learner.algorithms.aggregation:prompt_mean"


class EpisodeMean(Aggregation):
    """Mean over the episodes of the step of the mean over all tokens of an episode's trajectories, so that an
    agent which forks its context weighs no more than one that does not."""

    type: Literal["episode_mean"] = "episode_mean"
    computed_by: ClassVar[str] = "learner.algorithms.aggregation:prompt_mean"
    by_episode: ClassVar[bool] = True


class ConstantDenominator(Aggregation):
    """Sum over the tokens of a trajectory divided by a constant, as in Dr. GRPO (arXiv:2503.20783)."""

    type: Literal["constant"] = "constant"
    computed_by: ClassVar[str] = "learner.algorithms.aggregation:constant"
    tokens: int = Field(gt=0)
    """Sets what each trajectory's sum is divided by, such as the longest answer that is allowed."""


class PluginAggregation(Plugin, Aggregation):
    """An aggregation of the user's own: `function(lengths, prompts, **settings) -> (weights,
    denominators)`."""


UsedAggregation = (
    TokenMean | SequenceMean | PromptMean | EpisodeMean | ConstantDenominator | PluginAggregation
)
AggregationConfig = Annotated[AutoAggregation | UsedAggregation, Field(discriminator="type")]
SEQUENCE_SUM = ConstantDenominator(tokens=1)
"""The mean over the trajectories of the step of the sum over their tokens."""


class EntropyTargetConfig(Config):
    """An entropy that the bonus aims at: it grows while the policy's is below and shrinks while it is above
    (Skywork-OR1, arXiv:2505.22312). The defaults are those of the authors' scripts, but for the target."""

    nats: float | None = Field(None, gt=0)
    """Mean entropy of the trained tokens below which the bonus is given; the authors had 0.2. `None` leaves
    `entropy_coef` as it is. With a target that one is where the weight begins: afterwards the weight in the
    checkpoint counts."""
    coef_step: float = Field(1e-4, gt=0)
    """Change of `entropy_coef` after each update."""
    largest_coef: float = Field(0.005, gt=0)
    """Upper bound on `entropy_coef`, which also never falls below 0."""


NO_ENTROPY_TARGET = EntropyTargetConfig()
