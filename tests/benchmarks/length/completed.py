"""The advantage that leaves answers which were cut off out of the training."""

from collections.abc import Sequence
from dataclasses import replace

from bus.trajectory import Groups, Trajectory
from learner.algorithms.advantages.group_baselines import grpo_advantages


def completed_only(groups: Groups, *, std_floor: float) -> list[list[float]]:
    """Compare completed answers with the other completed answers of their prompt, as `grpo` does.

    One that was cut off is in no baseline and has an advantage of 0, so that it moves nothing."""
    return grpo_advantages([_completed(group) for group in groups], normalize_std=True, std_floor=std_floor)


def _completed(group: Sequence[Trajectory]) -> list[Trajectory]:
    return [t if t.end == "completed" else replace(t, trainable=False) for t in group]
