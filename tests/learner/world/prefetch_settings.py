"""Settings of reading ahead, and bits that flip."""

from pathlib import Path

from learner.config.learner import CheckpointConfig, LearnerConfig
from learner.config.model import ModelConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from storage.settings.evaluation import EvaluationConfig
from tests.factories import make_trajectory
from tests.storage.conftest import quick  # noqa: F401 - a fixture


def settings(directory: Path, save_every: int) -> LearnerSettings:
    return LearnerSettings(
        model=ModelConfig(),
        warmup=WarmupConfig(),
        learner=LearnerConfig(steps=9, checkpoint=CheckpointConfig(save_every=save_every)),
        evaluation=EvaluationConfig(every_versions=0),
        samples_per_prompt=2,
        seed=0,
        model_directory=directory / "model",
        checkpoints=directory,
        progress=directory / "progress.json",
        lineage=directory / "lineage.jsonl",
        export=directory / "export",
    )


def flip_a_bit(path: Path, lease_id: int = 0) -> None:
    """Damage the first trajectory of a segment that may be mapped: it keeps its length and inode."""
    tokens = make_trajectory(lease_id, 0).token_ids.tobytes()
    at = path.read_bytes().index(tokens)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([tokens[0] ^ 1]))
