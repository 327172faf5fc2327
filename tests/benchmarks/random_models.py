"""Models to measure with: shapes by name, and random weights, since there may be no others."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from actors.settings.engines import SglangEngineConfig
from benchmarks.model_shapes import SHAPES
from bus.errors import ConfigError
from learner.distributed.process_group import device
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import save_hf_directory


def shape(name: str) -> Qwen3Config | Qwen3MoeConfig:
    """Return the configuration of the model with this name. Raises `ConfigError` for one that there is
    not."""
    if name not in SHAPES:
        raise ConfigError(f"no model {name!r} to measure with: there are {', '.join(SHAPES)}")
    kind, model = Qwen3Config, "Qwen3ForCausalLM"
    if "num_experts" in SHAPES[name]:
        kind, model = Qwen3MoeConfig, "Qwen3MoeForCausalLM"
    return kind(
        **SHAPES[name],
        architectures=[model],  # by which inference engines tell what to serve
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def refuse_several(engine: SglangEngineConfig) -> None:
    """Raise `ConfigError` for settings that name several servers."""
    if engine.urls:
        raise ConfigError("--actors.engine.urls: one server is measured, name it with --actors.engine.url")


def random_model(name: str, *, seed: int = 0, where: torch.device | None = None) -> PreTrainedModel:
    """Return the model in its dtype with weights drawn from `seed`, by default on the GPU if there is one."""
    config = shape(name)
    torch.manual_seed(seed)
    with where or device():
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()


def write_model(name: str, directory: Path) -> Path:
    """Write it with a tokenizer of one token per character; returns the directory. Leaves every GPU alone,
    and draws on all cores: an 8B takes minutes on one."""
    tokenizer = character_tokenizer()
    model = random_model(name, where=torch.device("meta"))
    model.config.eos_token_id = tokenizer.eos_token_id
    state = {key: torch.ones(tensor.shape, dtype=tensor.dtype) for key, tensor in model.named_parameters()}
    matrices = [tensor for tensor in state.values() if tensor.dim() > 1]
    with ThreadPoolExecutor() as threads:
        [*threads.map(_draw, matrices, range(len(matrices)))]
    save_hf_directory(directory, model.config, state, None)
    tokenizer.save_pretrained(directory)
    return directory


def _draw(matrix: torch.Tensor, seed: int) -> None:
    matrix.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
