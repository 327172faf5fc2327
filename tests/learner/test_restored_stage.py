"""A backend is built for the stage that trains it first."""

from pathlib import Path

from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.config.warmup import WarmupConfig
from learner.initial import prepare
from learner.progress import Progress
from learner.restore import restore_alone
from learner.settings import LearnerSettings
from storage.evaluation_config import EvaluationConfig
from tests.learner.mini_run import SCRATCH


def test_a_run_without_warm_up_begins_with_what_only_reinforcement_learning_offloads(tmp_path: Path):
    settings = LearnerSettings(
        model=ModelConfig(scratch=SCRATCH, dtype="float32"),
        warmup=WarmupConfig(steps=0),
        learner=LearnerConfig.model_validate({"backend": "fsdp", "optimizer": {"offload": 1}}),
        evaluation=EvaluationConfig(every_versions=0),
        samples_per_prompt=2,
        seed=3,
        model_directory=tmp_path / "model",
        checkpoints=tmp_path / "checkpoints",
        progress=tmp_path / "progress.json",
        lineage=tmp_path / "lineage.jsonl",
        export=tmp_path / "export",
    )
    progress = Progress()
    backend = restore_alone(settings, prepare(settings, None), None, progress)
    assert (progress.stage, backend.optimizer_config.offload) == ("rl", 1)
