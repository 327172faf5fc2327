"""Writes adapters as a directory that peft loads: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from learner.backends.base import Adapters

SUBDIRECTORY = "adapter"
"""Name of the directory beside the whole weights that a run exports."""


def write_adapter(path: Path, adapters: Adapters, tensors: Mapping[str, Tensor], model: str) -> None:
    """Write the `tensors` that `adapters.streamed` gave; `model` says where the frozen weights are from."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(_config(adapters, model), indent=2) + "\n")
    save_file(dict(tensors), path / "adapter_model.safetensors", metadata={"format": "pt"})


def _config(adapters: Adapters, model: str) -> dict[str, JsonValue]:
    """Return what peft reads; what is missing has peft's default."""
    lora = adapters.config
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # peft declares whole numbers
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rank_stabilised,
        "use_dora": lora.weight_decomposed,
        "target_modules": [*(lora.targets or sorted({name.rsplit(".", 1)[-1] for name in adapters.modules}))],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
