"""Tells what one learner process is told: its sections of the configuration, and where its files lie."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bus.config import ColocationConfig
from bus.process.kernel_versions import installed
from learner.config.diagnostics import DiagnosticsConfig
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.warmup import WarmupConfig
from storage.settings.evaluation import EvaluationConfig


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Says how long a trajectory of the actors' engines may get."""

    tokens: int | None = None
    """Context of the engines, where it is set and may be shorter than the model's."""
    left_free: int = 0
    """Tokens of it that no trajectory takes up."""

    def longest_trajectory(self, model_context: int) -> int:
        """Return the most tokens that a trajectory has, prompt and answers together."""
        return min(model_context, self.tokens or model_context) - self.left_free


def used_diagnostics(model: ModelConfig, learner: LearnerConfig) -> DiagnosticsConfig:
    """Return the ranges of figures. In exact arithmetic engine and learner agree to the bit, unless the
    weights have moved between the updates of a step."""
    if model.numerics != "exact" or learner.batch.updates > 1:
        return learner.diagnostics
    return learner.diagnostics.model_copy(update={"largest_mismatch_nats": 0.0})


def shared_kernels(model: ModelConfig) -> dict[str, str]:
    """Return the versions of packages here that engines must have too, by name, where it uses their
    kernels."""
    return installed() if model.numerics == "sglang" else {}


@dataclass(frozen=True)
class LearnerSettings:
    """Says what one learner process needs to know."""

    model: ModelConfig
    warmup: WarmupConfig
    learner: LearnerConfig
    evaluation: EvaluationConfig
    samples_per_prompt: int
    """Siblings in a whole group."""
    seed: int
    model_directory: Path
    checkpoints: Path
    progress: Path
    """Says where the newest checkpoint's progress is written as JSON, for people and the summary."""
    lineage: Path
    """Says where the groups of every step are written down."""
    export: Path
    evaluated_on: Literal["own", "rollout", "none"] = "own"
    """The actors' engines that answer held-out prompts; those that roll out take later versions meanwhile."""
    colocation: ColocationConfig = field(default_factory=ColocationConfig)
    """Says whether actors share this host's devices."""
    engine_context: EngineContext = field(default_factory=EngineContext)
    """Says how long the trajectories of the actors' engines may get."""

    @property
    def diagnostics(self) -> DiagnosticsConfig:
        return used_diagnostics(self.model, self.learner)
