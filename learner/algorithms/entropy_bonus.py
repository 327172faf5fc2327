"""Adapts the weight of the entropy bonus to the entropy that the policy has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import JsonValue

from learner.config.algorithm import EntropyTargetConfig


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """The weight of the bonus between two updates, which a checkpoint keeps."""

    coef: float
    is_given: bool = True
    """Says whether the entropy was below its target in the last update."""

    @property
    def used_coef(self) -> float:
        """Return the weight in the next update."""
        return self.coef if self.is_given else 0.0

    def after(self, entropy: float, target: EntropyTargetConfig) -> Self:
        """Return the weight after an update whose trained tokens had this mean entropy in nats.

        One step up below the target, one step down otherwise, and no bonus while above (arXiv:2505.22312)."""
        if target.nats is None:
            return self
        below = entropy < target.nats
        moved = self.coef + (target.coef_step if below else -target.coef_step)
        return type(self)(min(max(moved, 0.0), target.largest_coef), below)

    def saved(self) -> list[JsonValue]:
        """Return what `restored` takes."""
        return [self.coef, float(self.is_given)]

    @classmethod
    def restored(cls, saved: Sequence[float]) -> Self:
        """Return what was saved."""
        coef, is_given = saved
        return cls(coef, bool(is_given))
