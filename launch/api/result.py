"""What came out of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from bus.codec import Json
from storage.metrics.records import integer, number


@dataclass(frozen=True)
class Result:
    """What a run is judged by once it has ended; None stands for what was not measured."""

    run: str
    stage: str
    """`done` when the learner ended by itself; `starting`, `warmup` or `rl` of a run that was stopped."""
    steps: int
    """Optimizer steps of reinforcement learning."""
    policy_version: int
    accuracy_start: float | None
    """Held-out reward of the untrained policy, sampled."""
    accuracy_end: float | None
    """Held-out reward of the last version, sampled."""
    wall_s: float
    """Seconds of the latest launch."""
    trajectories_trained: int
    max_staleness_seen: int
    """Worst staleness of a trained trajectory, in policy versions."""
    export: Path | None
    """Directory of the trained model, which transformers loads."""
    checkpoint: Path | None
    """The newest checkpoint."""
    summary: Mapping[str, Json]
    """All of summary.json."""


def result_of(summary: Mapping[str, Json]) -> Result:
    """Return the result that a run's summary tells."""
    return Result(
        run=str(summary["run"]),
        stage=str(summary["stage"]),
        steps=integer(summary, "steps"),
        policy_version=integer(summary, "policy_version"),
        accuracy_start=_measured(summary, "heldout_accuracy_start"),
        accuracy_end=_measured(summary, "heldout_accuracy_end"),
        wall_s=number(summary, "wall_s"),
        trajectories_trained=integer(summary, "trajectories_trained"),
        max_staleness_seen=integer(summary, "max_staleness_seen"),
        export=_path(summary, "export"),
        checkpoint=_path(summary, "checkpoint"),
        summary=summary,
    )


def _measured(summary: Mapping[str, Json], key: str) -> float | None:
    value = number(summary, key)
    return value if isfinite(value) else None


def _path(summary: Mapping[str, Json], key: str) -> Path | None:
    value = summary.get(key)
    return Path(value) if isinstance(value, str) else None
