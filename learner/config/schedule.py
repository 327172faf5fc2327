"""Settings of the learning rate's course after warm-up. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from bus.config import Config


class ConstantSchedule(Config):
    """The learning rate stays constant."""

    type: Literal["constant"] = "constant"
    """Name of the schedule."""


class CosineSchedule(Config):
    """The learning rate falls along half a cosine."""

    type: Literal["cosine"] = "cosine"
    """Name of the schedule."""

    decay_steps: int = Field(1000, gt=0)
    """Updates that the fall takes; afterwards the learning rate stays at `min_lr`."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the fall."""


class WSDSchedule(Config):
    """Warm-up, stable, decay: the learning rate stays for long, then falls in the end."""

    type: Literal["wsd"] = "wsd"
    """Name of the schedule."""

    stable_steps: int = Field(1000, ge=0)
    """Updates at the full learning rate."""

    decay_steps: int = Field(1000, gt=0)
    """Updates that the fall takes; afterwards the learning rate stays at `min_lr`."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of the fall."""

    decay: Literal["linear", "sqrt"] = "sqrt"
    """Shape of the fall: a straight line, or 1 - sqrt(x) where x is the share of the fall that has passed."""


ScheduleConfig = Annotated[ConstantSchedule | CosineSchedule | WSDSchedule, Field(discriminator="type")]
