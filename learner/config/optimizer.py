"""Settings of the optimizer and of the learning rate's course. Loads without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bus.config import Config


class ConstantSchedule(Config):
    """The learning rate stays constant."""

    type: Literal["constant"] = "constant"


class CosineSchedule(Config):
    """The learning rate falls along half a cosine."""

    type: Literal["cosine"] = "cosine"
    decay_steps: int = Field(1000, gt=0)
    """Updates that the fall takes; afterwards the learning rate stays at `min_lr`."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the fall."""


class WSDSchedule(Config):
    """Warm-up, stable, decay: the learning rate stays for long, then falls in the end."""

    type: Literal["wsd"] = "wsd"
    stable_steps: int = Field(1000, ge=0)
    """Updates at the full learning rate."""
    decay_steps: int = Field(1000, gt=0)
    """Updates that the fall takes; afterwards the learning rate stays at `min_lr`."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the fall."""
    decay: Literal["linear", "sqrt"] = "sqrt"
    """Shape of the fall: a straight line, or 1 - sqrt(x) where x is the share of the fall that has passed."""


ScheduleConfig = Annotated[ConstantSchedule | CosineSchedule | WSDSchedule, Field(discriminator="type")]


class OptimizerConfig(Config):
    """AdamW, or Muon beside it, with warm-up, then a schedule."""

    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the matrices of the layers: `adamw`, as of all other weights, or `muon`
    (arXiv:2502.16982). `beta1`, `beta2` and `eps` are AdamW's."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of Muon's sum of gradients, by which it looks ahead as Nesterov does."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after warm-up, the highest."""
    schedule: ScheduleConfig = ConstantSchedule()
    """Course of the learning rate after warm-up; it counts updates, not skipped steps."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the learning rate rises linearly; update u of w runs at lr * u / w."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; biases and norm weights are exempt."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the two moments between updates. bfloat16 takes half the memory; the update is in float32."""
    offload: float = Field(0.0, ge=0, le=1)
    """Share of the main weights and moments that lies in the host's memory and is updated there, by
    `learner.threads` threads."""
    offload_directory: Path | None = None
    """Directory on a fast local disk in which this share lies instead, in files without names that end with
    the process; None keeps it in memory."""
    clip_grad: float = Field(1.0, gt=0)
    """Upper bound on the global gradient norm; `inf` turns clipping off."""
    max_skipped_in_a_row: int = Field(10, ge=1)
    """Number of updates in a row, skipped since loss or gradient was not finite, that ends the run."""

    @model_validator(mode="after")
    def _settings_fit_each_other(self) -> Self:
        if self.matrices == "adamw" and self.momentum != type(self).model_fields["momentum"].default:
            raise ValueError(
                f"momentum={self.momentum} has no effect with matrices=adamw, whose means decay by beta1 and "
                "beta2: set matrices=muon, or leave it out"
            )
        if self.matrices == "muon" and self.offload:
            raise ValueError(
                f"offload={self.offload} is for matrices=adamw: Muon multiplies whole matrices, for which "
                "the host is too slow; set offload=0, or matrices=adamw"
            )
        if self.matrices == "muon" and self.state_dtype != "float32":
            raise ValueError(
                f"state_dtype={self.state_dtype} is for matrices=adamw: Muon keeps one float32 sum for a "
                "weight of a matrix, as much as two moments in bfloat16; set state_dtype=float32, or "
                "matrices=adamw"
            )
        if self.state_dtype == "bfloat16" and self.beta2 > 0.99:
            raise ValueError(
                f"state_dtype=bfloat16 needs beta2 <= 0.99 (it is {self.beta2}): bfloat16 has 8 bits, so "
                "rounding swallows the small changes of a slower mean"
            )
        if self.offload and self.state_dtype != "float32":
            raise ValueError(
                f"offload={self.offload} needs state_dtype=float32: it is {self.state_dtype}, which saves "
                "memory of the device"
            )
        if self.offload_directory is not None and not self.offload:
            raise ValueError(
                f"offload_directory={self.offload_directory} has no effect with offload=0: set offload to "
                "the share of the state that it is to take, or leave it out"
            )
        lowest = 0.0 if isinstance(self.schedule, ConstantSchedule) else self.schedule.min_lr
        if lowest > self.lr:
            raise ValueError(f"schedule.min_lr={lowest} is above lr={self.lr}: the schedule goes down")
        return self
