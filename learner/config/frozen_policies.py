"""Configuration of the frozen policies beside the trained one; loads without torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class ReferenceConfig(Config):
    """A frozen policy that the trained one is kept near, by its KL divergence from it.

    Its weights lie in main memory and take the model's place for one pass without gradients a step.
    """

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence in nats; 0 does without a reference."""

    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Sets how a sampled token tells the divergence, with r = log(policy / reference): k1 = r, k2 = r^2 / 2,
    k3 = exp(-r) - 1 + r, low_var_kl is k3 cut off at 10 nats. In the loss k1 has a mean gradient of 0."""

    kl_in: Literal["loss", "advantage", "reward"] = "loss"
    """A term of the loss, a penalty on each token's advantage, or one on the reward before it becomes an
    advantage. In the reward the policy is the one that sampled."""

    kl_unbiased: bool = False
    """Multiply the KL term of the loss by the importance ratio to the policy that sampled, as DeepSeek-V3.2
    does."""

    path: Path | None = None
    """Hugging Face directory of the reference, a model of the same architecture and vocabulary. Without it
    the policy that this stage begins with is the reference."""

    refresh_every: int | None = Field(None, gt=0)
    """Steps after which the policy as it then is becomes the reference, again and again."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        for name, value in (("path", self.path), ("refresh_every", self.refresh_every)):
            if value is not None and self.kl_coef == 0:
                raise ValueError(
                    f"reference.{name}={value} needs reference.kl_coef above 0 (0.001 is a good start): "
                    "without it there is no reference"
                )
        if self.kl_unbiased and self.kl_in != "loss":
            raise ValueError(
                "reference.kl_unbiased=true needs reference.kl_in=loss: advantages have the importance ratio "
                "of the loss already"
            )
        return self


NO_REFERENCE = ReferenceConfig()


class TeacherConfig(Config):
    """On-policy distillation: a frozen policy whose likelihood of each sampled token is rewarded."""

    path: Path | None = None
    """Hugging Face directory of the teacher, a model of the same architecture and vocabulary. Without it
    there is none."""

    coef: float = Field(1.0, gt=0)
    """Each token's advantage loses so many times log(policy / teacher), in nats."""


NO_TEACHER = TeacherConfig()
