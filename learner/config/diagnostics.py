"""Settings of the ranges that figures of a step should lie in, and of recorded log-probs. Loads without
torch."""

from typing import Self

from pydantic import Field, model_validator

from bus.config import Config


class DiagnosticsConfig(Config):
    """Ranges of figures; the learner warns in words when one leaves its range. `None` sets no bound."""

    least_ess_fraction: float | None = Field(0.3, gt=0, lt=1)
    """Lower bound on `policy/ess_fraction`."""
    largest_mean_ratio: float | None = Field(2.0, gt=1)
    """Upper bound on `policy/importance_ratio`; its reciprocal is the lower one."""
    largest_ratio: float | None = Field(None, gt=1)
    """Upper bound on `policy/importance_ratio_max`."""
    largest_k3_nats: float | None = Field(0.2, gt=0)
    """Upper bound on `policy/k3_nats`."""
    largest_chi_square: float | None = Field(None, gt=0)
    """Upper bound on `policy/chi_square`, which `policy/ess_fraction` bounds as well."""
    largest_mismatch_nats: float | None = Field(0.1, gt=0)
    """Upper bound on `policy/mismatch_nats`."""
    mismatch_pause_steps: int | None = Field(3, ge=1)
    """Steps in a row after which admission is paused, with `policy/mismatch_nats` above its bound or an alarm
    of the probe: leases are issued for the next step alone, until a step has neither. `None` never pauses."""
    mismatch_end_steps: int | None = Field(10, ge=1)
    """Such steps in a row after which the run ends. `None` never ends it."""
    largest_drift_nats: float | None = Field(0.3, gt=0)
    """Upper bound on `policy/drift_nats`."""
    largest_teacher_kl_nats: float | None = Field(None, gt=0)
    """Upper bound on `policy/teacher_kl_nats`, which depends on how far the teacher is at first."""
    largest_clipped_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Upper bound on `policy/clipped_fraction`."""
    largest_truncated_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Upper bound on `policy/truncated_fraction`."""
    largest_rejected_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Upper bound on `policy/rejected_fraction`."""
    largest_cut_off_fraction: float | None = Field(0.0, ge=0, lt=1)
    """Upper bound on `rollout/cut_off_fraction`: tokens drawn with `top_p`, `top_k` or `min_p` and without a
    kept set."""
    least_completed_fraction: float | None = Field(0.5, gt=0, lt=1)
    """Lower bound on `rollout/completed_fraction`."""
    least_entropy_nats: float | None = Field(None, gt=0)
    """Lower bound on `policy/entropy_nats`, which depends on the task."""
    largest_queued_versions: float | None = Field(None, gt=0)
    """Upper bound on `staleness/queued_mean_versions`."""
    largest_generation_versions: float | None = Field(None, gt=0)
    """Upper bound on `staleness/generation_mean_versions`."""
    largest_length_ratio: float | None = Field(1.5, gt=1)
    """Upper bound on `selection/length_ratio`; its reciprocal is the lower one."""
    largest_reward_shift: float | None = Field(None, gt=0)
    """Upper bound on the absolute value of `selection/reward_shift`, which depends on the rewards. A filter
    of groups without variance shifts it by design."""

    @model_validator(mode="after")
    def _pauses_before_it_ends(self) -> Self:
        pause, end = self.mismatch_pause_steps, self.mismatch_end_steps
        if pause is not None and end is not None and pause > end:
            raise ValueError(
                f"mismatch_pause_steps={pause} is above mismatch_end_steps={end}: the run would end "
                "before its admission is paused"
            )
        return self


class RecordedLogprobsConfig(Config):
    """A few trajectories whose log-probs under the learner's weights are recorded in the run's directory.
    `launch dashboard` colours their tokens by importance ratio."""

    every_steps: int = Field(10, ge=0)
    """Steps from one record to the next, beginning with the first step; 0 records nothing."""
    trajectories: int = Field(4, ge=1)
    """Trajectories of a record. They take a pass without gradient before the step."""

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 1, has a record."""
        return self.every_steps > 0 and (step - 1) % self.every_steps == 0
