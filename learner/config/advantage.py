"""Settings of how rewards become advantages. Loads without torch."""

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.config.plugin import Choice, Plugin


class AdvantageEstimator(Choice):
    """Base of the advantage estimators (learner/algorithms/advantages/step_advantages.py)."""

    whitens: ClassVar[bool] = False
    """The advantages have mean 0 and variance 1 over the step already."""
    needs_critic: ClassVar[bool] = False
    """The estimate goes by what a critic predicts."""
    takes_negative_rewards: ClassVar[bool] = True
    """The estimate is defined for rewards below 0."""

    @property
    def reward_parts(self) -> Collection[str] | None:
        """Return names of the parts of the reward that it takes one by one; None where it takes the whole."""
        return None


class RelativeAdvantage(AdvantageEstimator):
    """Base of estimators that compare rewards with each other."""

    normalize_std: bool = True
    """Divide by the population standard deviation of what is compared. `False` only removes the mean, as Dr.
    GRPO (arXiv:2503.20783) does; that also divides the loss by a constant (`aggregation.type`)."""
    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""


class GRPOAdvantage(RelativeAdvantage):
    """Reward relative to the agent's other rewards in its group."""

    type: Literal["grpo"] = "grpo"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:grpo_advantages"


class RLOOAdvantage(AdvantageEstimator):
    """Reward less the mean of the agent's other rewards in its group (arXiv:2402.14740)."""

    type: Literal["rloo"] = "rloo"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:rloo_advantages"


class OAPLAdvantage(AdvantageEstimator):
    """Reward less the optimal value of the prompt, b log mean exp(reward / b) over its group
    (arXiv:2602.19362)."""

    type: Literal["oapl"] = "oapl"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:oapl_advantages"
    value_kl_weight: float = Field(1.0, gt=0)
    """Number b, in units of the reward: a small one makes the best reward of the group its value, a large one
    the mean."""


class MaxRLAdvantage(AdvantageEstimator):
    """Reward relative to the mean of its group, in units of that mean (arXiv:2602.02710); rewards are at
    least 0."""

    type: Literal["maxrl"] = "maxrl"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:maxrl_advantages"
    takes_negative_rewards: ClassVar[bool] = False


class GDPOAdvantage(AdvantageEstimator):
    """Several rewards, each normalised in the group, then added by weight and whitened over the step
    (arXiv:2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:gdpo_advantages"
    whitens: ClassVar[bool] = True
    rewards: dict[str, float] = Field(min_length=1)
    """Weights of the parts of the outcome's reward, by name (`reward_components` of a trajectory). A reward
    that comes late has no parts, and so no effect."""
    std_floor: float = Field(1e-4, ge=0)
    """Added to the standard deviation before the division."""

    @property
    def reward_parts(self) -> Collection[str]:
        return self.rewards


class ReinforcePPAdvantage(AdvantageEstimator):
    """Reward less the KL penalties still to come, whitened over the step (REINFORCE++, arXiv:2501.03262)."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.reinforce_pp:reinforce_pp_advantages"
    whitens: ClassVar[bool] = True
    discount_per_token: float = Field(1.0, gt=0, le=1)
    """Factor of what comes a token later."""


class ReinforcePPBaselineAdvantage(AdvantageEstimator):
    """Reward less the mean of the group, whitened over the step (REINFORCE++ with baseline)."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.reinforce_pp:reinforce_pp_baseline_advantages"
    whitens: ClassVar[bool] = True


class DiscountedReturns(RelativeAdvantage):
    """Each turn has the discounted sum of its own reward and those after it."""

    type: Literal["discounted_returns"] = "discounted_returns"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.turns:discounted_return_advantages"
    discount_per_turn: float = Field(1.0, gt=0, le=1)
    """Factor of what comes a turn later."""
    baseline: Literal["turn", "none"] = "turn"
    """Compare a return with those of the same turn in the agent's other rollouts (arXiv:2511.14846), or leave
    it as it is."""


class TurnCredit(RelativeAdvantage):
    """Each turn has the advantage of its own reward, beside that of the outcome (MT-GRPO,
    arXiv:2505.11821)."""

    type: Literal["turn_credit"] = "turn_credit"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.turns:turn_credit_advantages"
    outcome_coef: float = Field(1.0, ge=0)
    """Weight of the outcome in a turn that has a reward of its own."""


class HierarchicalAdvantage(RelativeAdvantage):
    """Some agents are compared within their episode, the others with themselves in the other episodes."""

    type: Literal["hierarchical"] = "hierarchical"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.group_baselines:hierarchical_advantages"
    within_episode: tuple[str, ...] = Field(min_length=1)
    """Agents whose trajectories in an episode are attempts at the same thing, such as the solvers of a
    problem that another agent posed."""


class RAEAdvantage(AdvantageEstimator):
    """Reward less a moving average of the agent's rewards (role-conditioned advantage estimation of SPIRAL,
    arXiv:2506.24119). The averages are in every checkpoint."""

    type: Literal["rae"] = "rae"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.rae:rae_advantages"
    decay: float = Field(0.95, ge=0, lt=1)
    """Weight of the past in the average at each episode."""
    metadata_key: str | None = None
    """Entry of the trajectories' metadata, such as the name of a game, each value of which has averages of
    its own."""


class GAEAdvantage(AdvantageEstimator):
    """What a critic did not foresee of the rewards, action by action (generalised advantage estimation,
    arXiv:1506.02438). `learner.critic` says what an action is."""

    type: Literal["gae"] = "gae"
    computed_by: ClassVar[str] = "learner.algorithms.advantages.gae:gae_advantages"
    needs_critic: ClassVar[bool] = True
    trace_decay: float = Field(0.95, ge=0, le=1)
    """Weight of what comes later against the critic's prediction (lambda): 1 is the return less the value, 0
    looks one action ahead. The critic's targets have their own (arXiv:2503.01491)."""


class PluginAdvantage(Plugin, AdvantageEstimator):
    """An estimator of the user's own: `function(groups, **settings)` gives an advantage for each
    trajectory."""


AdvantageConfig = Annotated[
    GRPOAdvantage
    | RLOOAdvantage
    | OAPLAdvantage
    | MaxRLAdvantage
    | GDPOAdvantage
    | ReinforcePPAdvantage
    | ReinforcePPBaselineAdvantage
    | DiscountedReturns
    | TurnCredit
    | HierarchicalAdvantage
    | RAEAdvantage
    | GAEAdvantage
    | PluginAdvantage,
    Field(discriminator="type"),
]


class OverlongPenalty(Config):
    """Takes from the reward of long answers before it becomes an advantage (soft overlong punishment of DAPO,
    arXiv:2503.14476, eq. 13)."""

    longest_tokens: int | None = Field(None, gt=0)
    """Sampled tokens from which on a trajectory loses the whole penalty; `None` sets no penalty."""
    margin_tokens: int = Field(0, ge=0)
    """Tokens below `longest_tokens` at which the penalty begins; it grows evenly in between."""
    coef: float = Field(1.0, gt=0)
    """Largest penalty."""

    @model_validator(mode="after")
    def _margin_is_within(self) -> Self:
        if self.margin_tokens > (self.longest_tokens or 0):
            raise ValueError(
                f"overlong.margin_tokens={self.margin_tokens} is beyond overlong.longest_tokens="
                f"{self.longest_tokens}: set that to the longest answer that is wanted"
            )
        return self


NO_OVERLONG = OverlongPenalty()
OVERLONG = "overlong_penalty"
"""Name of the penalty among the reward components of a trajectory."""
