"""How far a run has come: saved inside every checkpoint, so that counters and weights move together."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

Stage = Literal["warmup", "rl", "done"]


@dataclass
class Progress:
    """Where training stands. `step` counts optimizer steps of the reinforcement learning stage."""

    stage: Stage = "warmup"
    warmup_step: int = 0
    step: int = 0
    policy_version: int = 0
    trains_from: int = 0
    """Version with which reinforcement learning began; afterwards version = trains_from + step."""
    trajectories_trained: int = 0
    tokens_trained: int = 0
    steps_skipped: int = 0
    max_staleness_seen: int = 0
    warmup_s: float = 0.0
    rl_s: float = 0.0
    """Seconds spent in the stage, over all incarnations."""
    target_reached_s: float | None = None
    """`rl_s` at which held-out accuracy first reached the target."""
    target_reached_step: int | None = None
    evaluations: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Version -> (sampled, greedy) held-out accuracy."""

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """From a checkpoint."""
        evaluations = {version: (pair[0], pair[1]) for version, pair in values["evaluations"].items()}
        return cls(**{**values, "evaluations": evaluations})

    def sampled_accuracy(self, policy_version: int) -> float | None:
        """Held-out sampled accuracy of a version, if it was measured."""
        pair = self.evaluations.get(str(policy_version))
        return None if pair is None else pair[0]
