"""Writes adapters as a directory that peft loads: `adapter_config.json` and `adapter_model.safetensors`.

In models of transformers the routed experts of a layer are two tensors, `experts.gate_up_proj` and
`experts.down_proj`. peft makes adapters of these from those of each expert, by the names of files; gate and
up have one then, of twice the rank. Of a mixture it takes every target that ends as `gate_proj` for that of
experts, and leaves dense layers and shared experts without. So these are named as parameters, which it takes
as they are."""

import json
from collections.abc import Iterator, Mapping
from math import sqrt
from pathlib import Path

import torch
from pydantic import JsonValue
from safetensors.torch import save_file
from torch import Tensor

from learner.backends.contract.backend import TrainedAdapters
from learner.model_directories.lazy_weights import spec_of
from storage.model_files.adapter_names import WEIGHT, adapter_names

MLP = (".gate_proj", ".up_proj", ".down_proj")
"""Ends of names that peft takes for those of experts in a mixture."""
STACKED = ["down_proj", "gate_up_proj"]
"""What transformers calls the tensors of all experts of a layer."""
SUBDIRECTORY = "adapter"
"""Name of the directory beside the whole weights that a run exports."""


def write_adapter(path: Path, adapters: TrainedAdapters, tensors: Mapping[str, Tensor], model: str) -> None:
    """Write the `tensors` that `adapters.streamed` gave; `model` says where the frozen weights are from."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(_config(adapters, model), indent=2) + "\n")
    whole = {**dict(_lacking(adapters, tensors)), **tensors}
    save_file(whole, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _lacking(adapters: TrainedAdapters, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters of 0 for experts' projections without one in a layer where others have one: peft makes
    one of all."""
    layers = {module.rsplit(".", 2)[0] for module in adapters.modules if _is_routed(module)}
    for name in adapters.base:
        module = name.removesuffix(WEIGHT)
        if _is_routed(module) and module.rsplit(".", 2)[0] in layers:
            outputs, inputs = spec_of(adapters.base, name).shape
            shapes = (adapters.config.rank, inputs), (outputs, adapters.config.rank)
            for each, shape in zip(adapter_names(name), shapes, strict=True):
                if each not in tensors:
                    yield each, torch.zeros(shape)


def _is_routed(module: str) -> bool:
    parts = module.split(".")
    return len(parts) > 2 and parts[-3] == "experts" and parts[-2].isdigit()


def _config(adapters: TrainedAdapters, model: str) -> dict[str, JsonValue]:
    lora = adapters.config
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # peft declares whole numbers
    return {
        "peft_type": "LORA",
        **_form(adapters),
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rank_stabilised,
        "use_dora": lora.weight_decomposed,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **_targets(adapters),
    }


def _form(adapters: TrainedAdapters) -> dict[str, JsonValue]:
    if not adapters.whole:
        return {"task_type": "CAUSAL_LM"}
    return {"task_type": "SEQ_CLS", "modules_to_save": [n.removesuffix(WEIGHT) for n in adapters.whole]}


def _targets(adapters: TrainedAdapters) -> dict[str, JsonValue]:
    """Return what says which layers have adapters. Those of DoRA can be modules alone."""
    lora = adapters.config
    is_mixture = any(_is_routed(name.removesuffix(WEIGHT)) for name in adapters.base)
    of_mlp = [module for module in adapters.modules if _is_routed(module) or module.endswith(MLP)]
    if not is_mixture or not of_mlp or lora.weight_decomposed:
        ends = sorted({name.rsplit(".", 1)[-1] for name in adapters.modules})
        return {"target_modules": [*(lora.targets or ends)]}
    others = [module for module in adapters.modules if module not in of_mlp]
    if not lora.targets:
        others = sorted({module.rsplit(".", 1)[-1] for module in others})
    dense = [module + WEIGHT for module in of_mlp if not _is_routed(module)]
    if len(dense) == len(of_mlp):
        return {"target_modules": [*others], "target_parameters": [*dense]}
    twice = lora.alpha * (sqrt(2) if lora.rank_stabilised else 2)
    return {
        "target_modules": [*others],
        "target_parameters": [*dense, *STACKED],
        "rank_pattern": {r".*\.gate_up_proj": 2 * lora.rank},
        "alpha_pattern": {r".*\.gate_up_proj": twice},
    }
