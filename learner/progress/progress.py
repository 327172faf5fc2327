"""Tells how far a run has come: saved inside every checkpoint, so that counters and weights move together."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from bus.errors import StorageError
from bus.requests import StepGroups
from learner.config.process_settings import LearnerSettings
from learner.progress import lineage
from storage.disk import checkpoints

Stage = Literal["warmup", "rl", "done"]


@dataclass(frozen=True)
class Best:
    """The checkpoint whose version scored best."""

    metric: str
    """Data set and score, as `evaluation.best` names them."""
    value: float
    policy_version: int
    step: int
    """Step of the checkpoint."""


@dataclass
class Progress:
    """Says where training stands. `step` counts optimizer steps of the reinforcement learning stage."""

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
    """`rl_s` at which held-out reward first reached the target."""
    target_reached_step: int | None = None
    evaluations: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Version -> (sampled, greedy) held-out reward."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Step -> leases of its groups, of the steps since the checkpoint before."""
    baselines: dict[str, float] = field(default_factory=dict)
    """What the advantage estimator keeps from step to step, by name."""
    best: Best | None = None
    """The best checkpoint by the score that `evaluation.best` names; None if none is known."""
    awaited: list[int] = field(default_factory=list)
    """Steps whose versions are being evaluated: each may turn out to be the best."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        evaluations = {version: (pair[0], pair[1]) for version, pair in values["evaluations"].items()}
        best = values.get("best")
        return cls(**{**values, "evaluations": evaluations, "best": best and Best(**best)})

    @property
    def kept(self) -> frozenset[int]:
        """Steps whose checkpoints are kept, however many newer ones there are."""
        return kept_steps(self.to_json())

    def end_warm_up(self, *, has_trained: bool) -> None:
        """Enter reinforcement learning, from a new policy version if the warm-up changed the weights."""
        self.policy_version += has_trained
        self.trains_from = self.policy_version
        self.stage = "rl"

    def sampled_accuracy(self, policy_version: int) -> float | None:
        """Held-out sampled accuracy of a version, if it was measured."""
        pair = self.evaluations.get(str(policy_version))
        return None if pair is None else pair[0]

    def lacks_evaluation(self, every: int) -> bool:
        """Return whether the last version that was to be measured, of those of every so many steps, has no
        result: a stop may have come first."""
        if not every or self.stage != "rl":
            return False
        return self.sampled_accuracy(self.trains_from + self.step - self.step % every) is None

    def note_evaluation(
        self, policy_version: int, sampled: float, greedy: float, *, target: float | None
    ) -> None:
        """Keep a version's held-out accuracies, and when a sampled one was the first to reach `target`."""
        measured = {str(policy_version): (sampled, greedy)}
        self.evaluations = self.evaluations | measured  # a checkpoint's thread may read the old one
        reached = target is not None and sampled >= target and self.stage == "rl"
        if reached and self.target_reached_step is None:
            self.target_reached_step = self.step
            self.target_reached_s = self.rl_s

    def forget_groups(self, through: int) -> None:
        """Drop groups of the steps up to `through`: an earlier checkpoint has them."""
        self.groups = {step: leases for step, leases in self.groups.items() if int(step) > through}


def kept_steps(saved: Mapping[str, Any]) -> frozenset[int]:
    """Return `Progress.kept` of what a checkpoint keeps of the progress, as `to_json` gives it."""
    best = saved.get("best")
    return frozenset([*saved.get("awaited", ()), *([best["step"]] if best else ())])


def checkpoint_step(saved: Mapping[str, Any]) -> int:
    """Return the step by which storage/disk/checkpoints.py names a checkpoint that keeps this progress."""
    in_warmup = saved.get("stage") == "warmup"
    return checkpoints.supervised(saved["warmup_step"]) if in_warmup else int(saved["step"])


def values_to_save(settings: LearnerSettings, progress: Progress) -> dict[str, Any]:
    """Return what a checkpoint at `progress` holds: all of it, with the groups of the steps since the one
    before.

    Their lines of the lineage are on the disk before it: what a kill costs is only what no checkpoint holds.
    """
    lineage.sync(settings.lineage)
    saved = [step for step in checkpoints.steps(settings.checkpoints) if step < progress.step]
    progress.forget_groups(max(saved, default=0))
    return progress.to_json()


async def refuse_other_history(
    progress: Progress, path: Path, given: Callable[[int], Awaitable[StepGroups]]
) -> None:
    """Raise `StorageError` when the lineage at `path`, or storage, knows other groups than the checkpoint."""
    groups = {int(step): leases for step, leases in progress.groups.items()}
    lineage.refuse_other_groups(path, groups)
    for step, leases in groups.items():
        answer = [group.lease_id for group in (await given(step)).groups]
        if answer != leases:
            raise StorageError(
                f"the checkpoint of step {progress.step} trained step {step} on groups {leases}, but storage "
                f"gave it {answer or 'none'}: they are of different histories; restore the ledger, or move "
                "this checkpoint away to go on from the one before"
            )
