"""Opens the model of a directory: that of Hugging Face files, or of a checkpoint that a backend wrote."""

from pathlib import Path

from transformers import PretrainedConfig

from learner.backends.megatron.model import lora
from learner.backends.megatron.weights.torch_dist import is_checkpoint, model_in
from learner.backends.shared.lora import MergedWeights
from learner.config.lora import LoraConfig
from learner.model_directories.checkpoint_manifest import is_written_by
from learner.model_directories.lazy_weights import LazyWeights
from learner.model_directories.model_directory import HFWeights, load_hf_config
from learner.model_directories.text_model import text_weights


def load_hf_directory(path: Path) -> tuple[PretrainedConfig, LazyWeights]:
    """Read `config.json`, and open the weights: one safetensors file, an index of several, or a checkpoint.

    Weights are read when they are looked up. Of a multimodal model that is not trained as a whole these are
    the text model's. Raises `ConfigError` when something is missing or unreadable, and `StorageError` for a
    checkpoint whose metadata is unreadable or lacks a tensor."""
    hf_config = load_hf_config(path)
    if not is_checkpoint(path):
        return hf_config, text_weights(HFWeights(path), hf_config)
    if is_written_by("fsdp", path):
        from learner.backends.fsdp.checkpoint_weights import CheckpointWeights  # imports much of transformers

        return hf_config, CheckpointWeights(path, hf_config)
    return hf_config, model_in(path, hf_config)


def merged_model(checkpoint: Path, base: Path, config: LoraConfig) -> tuple[PretrainedConfig, LazyWeights]:
    """Open what the adapters of a checkpoint, whose settings were `config`, make of the weights in `base`.
    Raises as `load_hf_directory` and `MergedWeights` do."""
    hf_config = load_hf_config(checkpoint)
    _, weights = load_hf_directory(base)
    if is_written_by("fsdp", checkpoint):
        from learner.backends.fsdp.checkpoint_weights import adapters_in  # imports much of transformers

        return hf_config, MergedWeights(weights, adapters_in(checkpoint, hf_config), config)
    return hf_config, MergedWeights(weights, lora.adapters_in(checkpoint, hf_config, config), config)
