"""Settings that hold up the policy's entropy. Loads without torch."""

from pydantic import Field

from bus.config import Config


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
