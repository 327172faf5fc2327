"""Settings of the critic, which predicts what the policy will still be rewarded for. Loads without torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config
from learner.config.optimizer import OptimizerConfig


class CriticOptimizerConfig(OptimizerConfig):
    """Optimizer of the critic."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate after warm-up, the highest."""


class CriticConfig(Config):
    """A second model with one output, the value of the state in which a token is sampled.

    It shares the policy's `learner.parallel`, `learner.batch` and `model.dtype`; all of its weights are
    trained, and they are in every checkpoint of the run."""

    train: Literal["auto", "always"] = "auto"
    """`auto`: there is a critic where `learner.advantage.type` is `gae`. `always`: also beside another
    advantage, such as a function of the user's with a parameter `critic`."""
    path: Path | None = None
    """Hugging Face directory that the critic begins with; its architecture may differ from the policy's, its
    vocabulary may not. `score.weight` and `score.bias` there are the value head; a critic without them
    begins with values of 0. Without a directory it begins as the policy with which reinforcement learning
    begins."""
    level: Literal["token", "turn"] = "token"
    """What an action is, for the critic and for `gae`: a sampled token, or all sampled tokens of a turn,
    which then have one value, that of the state before the first of them."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of what comes an action later (gamma)."""
    trace_decay: float = Field(1.0, ge=0, le=1)
    """Weight of what comes later against the critic's own prediction, in the targets of the critic (lambda):
    1 is the discounted return, 0 looks one action ahead."""
    targets: Literal["gae", "vtrace"] = "gae"
    """`gae`: what the critic learns is the value of the policies that sampled (arXiv:1506.02438). `vtrace`:
    that of the policy before the step, by truncated importance weights (arXiv:1802.01561), which takes a pass
    for its log-probs; the advantages of `gae` are then V-trace's as well."""
    rho_bar: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Upper bound on the importance weight of an action in `vtrace`: what is learned is the value of a policy
    between the one that sampled (near 0) and the present one (large)."""
    c_bar: float = Field(1.0, gt=0, le=1)
    """Upper bound on the weights in `vtrace` by which later actions count for earlier ones. It is at most 1,
    since the product of larger weights over a long trajectory overflows."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of the run at whose end the policy is what it was before: only the critic trains in them."""
    epochs: int = Field(1, ge=1)
    """Times that the critic trains on each batch."""
    loss_coef: float = Field(1.0, gt=0)
    """Factor of the critic's loss, which is half the mean squared error."""
    value_clip: float = Field(0.2, gt=0)
    """Distance from the value before the step beyond which a value gains nothing (PPO2; arXiv:1707.06347);
    `inf` turns it off. It has an effect from the second update on a batch on."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """AdamW of the critic, with its own schedule."""

    @model_validator(mode="after")
    def _traces_are_no_longer_than_weights(self) -> Self:
        if self.targets == "vtrace" and self.c_bar > self.rho_bar:
            raise ValueError(
                f"critic.c_bar={self.c_bar} is above critic.rho_bar={self.rho_bar}: V-trace needs at most "
                "that (arXiv:1802.01561, section 4.1)"
            )
        return self


NO_CRITIC = CriticConfig()
