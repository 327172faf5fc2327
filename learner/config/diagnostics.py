"""Settings of the ranges that figures of a step should lie in. Loads without torch."""

from pydantic import Field

from bus.config import Config


class DiagnosticsConfig(Config):
    """Ranges of figures; the learner warns in words when one leaves its range. `None` sets no bound."""

    least_ess_fraction: float | None = Field(0.3, gt=0, lt=1)
    """Lower bound on `policy/ess_fraction`."""

    largest_mean_ratio: float | None = Field(2.0, gt=1)
    """Upper bound on `policy/importance_ratio`; its reciprocal is the lower one."""

    largest_mismatch_nats: float | None = Field(0.1, gt=0)
    """Upper bound on `policy/mismatch_nats`."""

    largest_rejected_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Upper bound on `policy/rejected_fraction`."""

    largest_cut_off_fraction: float | None = Field(0.0, ge=0, lt=1)
    """Upper bound on `rollout/cut_off_fraction`: tokens drawn with `top_p` below 1 or with `top_k`."""

    least_completed_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Lower bound on `rollout/completed_fraction`."""

    least_entropy_nats: float | None = Field(None, gt=0)
    """Lower bound on `policy/entropy_nats`, which depends on the task."""
