"""Settings of a run that stands at a stage."""

from pathlib import Path

from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from storage.settings.evaluation import EvaluationConfig
from tests.learner.mini_run import SCRATCH


def settings_of(tmp_path: Path, **learner: object) -> LearnerSettings:
    return LearnerSettings(
        model=ModelConfig(scratch=SCRATCH, dtype="float32"),
        warmup=WarmupConfig(steps=0),
        learner=LearnerConfig.model_validate({"backend": "fsdp", **learner}),
        evaluation=EvaluationConfig(every_versions=0),
        samples_per_prompt=2,
        seed=3,
        model_directory=tmp_path / "model",
        checkpoints=tmp_path / "checkpoints",
        progress=tmp_path / "progress.json",
        lineage=tmp_path / "lineage.jsonl",
        export=tmp_path / "export",
    )
