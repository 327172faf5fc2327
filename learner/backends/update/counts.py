"""Counts the updates of a policy, and says what each of them did, whatever backend trains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from learner.algorithms.entropy_bonus import EntropyBonus
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import StepResult
from learner.backends.update.decision import not_finite_in_a_row
from learner.backends.update.loss_step import pair_means, step_diagnostics
from learner.config.loss import Loss
from learner.config.optimizer import OptimizerConfig


@dataclass
class UpdateCounts:
    """Where training stands, apart from weights and moments."""

    steps_done: int = 0
    """Calls of `train_step`, skipped ones included."""
    updates_done: int = 0
    """Updates by this optimizer, which the schedule counts."""
    entropy_bonus: EntropyBonus | None = None
    """Weight of the entropy bonus where it aims at a target."""
    not_finite_in_a_row: int = 0
    """Updates skipped since the last whose loss and gradient were finite."""

    def begin(self) -> None:
        """Start over, as a fresh optimizer does; the calls of `train_step` go on."""
        self.updates_done, self.entropy_bonus, self.not_finite_in_a_row = 0, None, 0

    def objective(self, loss: Loss | Objective) -> Objective:
        """Return the objective with the weight of the entropy bonus that earlier updates have led to."""
        objective = loss if isinstance(loss, Objective) else Objective(loss)
        if objective.entropy_target.nats is None:
            self.entropy_bonus = None
            return objective
        self.entropy_bonus = self.entropy_bonus or EntropyBonus(objective.entropy_coef)
        largest = objective.entropy_target.largest_coef  # may be lower than before a checkpoint
        return replace(objective, entropy_coef=min(self.entropy_bonus.used_coef, largest))

    def finished(
        self, objective: Objective, sums: Mapping[str, float], norm: float, lr: float, config: OptimizerConfig
    ) -> StepResult:
        """Count an update, and say what it did. Raises `TrainingError` after `config.max_skipped_in_a_row`
        updates that were not finite. `sums` are over all ranks and micro-batches, and `norm` is of the
        gradient before clipping."""
        tokens = int(sums["trained_tokens"])
        mean_loss = sums["loss"] / (sums["denominator"] or 1.0)
        updated = tokens > 0 and math.isfinite(mean_loss) and math.isfinite(norm)
        self.steps_done += 1
        self.updates_done += updated
        self.not_finite_in_a_row = not_finite_in_a_row(
            self.not_finite_in_a_row, mean_loss, norm, config, "optimizer"
        )
        left_out = int(sums["left_out_tokens"])
        diagnostics = step_diagnostics(sums, tokens - left_out)
        if self.entropy_bonus is not None:
            diagnostics["entropy_coef"] = objective.entropy_coef
            if updated:
                entropy = diagnostics["entropy_nats"]
                self.entropy_bonus = self.entropy_bonus.after(entropy, objective.entropy_target)
        return StepResult(
            loss=mean_loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            computed_tokens=int(sums["computed_tokens"]),
            denominator=sums["denominator"],
            skipped=not updated,
            diagnostics=diagnostics,
            left_out_tokens=left_out,
            pairs=pair_means(sums),
        )

    def saved(self) -> dict[str, JsonValue]:
        """Return what a checkpoint keeps of the counts."""
        return {
            "steps_done": self.steps_done,
            "updates_done": self.updates_done,
            "entropy_bonus": self.entropy_bonus.saved() if self.entropy_bonus else None,
        }

    def restore(self, training: Mapping[str, Any]) -> None:
        """Go on where `saved` says."""
        self.steps_done, self.updates_done = training["steps_done"], training["updates_done"]
        bonus = training.get("entropy_bonus")
        self.entropy_bonus = EntropyBonus.restored(bonus) if bonus else None
