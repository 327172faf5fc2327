"""The configuration of a run's model, whose weights need not be there."""

from transformers import PretrainedConfig

from launch.model_files.hub_revision import pinned
from launch.model_files.model_directory import model_on_disk
from launch.settings.run_config import RunConfig
from learner.initial.scratch_model import scratch_config
from learner.model_directories.model_directory import load_hf_config
from storage.disk.run_directory import RunDirectory


def run_hf_config(config: RunConfig) -> PretrainedConfig:
    """Return it, by the directory of --model.path or as the scratch model has it. Nothing is fetched.

    Raises `ConfigError` where there is no readable config.json on this host."""
    if config.model.path is None:
        return scratch_config(config.model.scratch)
    return load_hf_config(
        model_on_disk(pinned(config.model.path, RunDirectory(config.directory, config.run)))
    )
