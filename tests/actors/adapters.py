"""Random low-rank adapters of tiny policies, and the policies that they make."""

from copy import deepcopy

import torch
from transformers import PreTrainedModel

from actors.engines.served_adapters import ServedAdapters
from storage.model_files.adapter_names import WEIGHT, adapter_names

RANK, SCALE = 4, 1.5
MODULES = ("down_proj", "o_proj", "q_proj", "up_proj")
"""Without some of the layers that SGLang computes together with them."""


def served(versions: int) -> ServedAdapters:
    return ServedAdapters(rank=RANK, scale=SCALE, modules=MODULES, versions=versions)


def adapter_of(
    model: PreTrainedModel, seed: int, modules: tuple[str, ...] = MODULES, rank: int = RANK
) -> dict[str, torch.Tensor]:
    """A and B by peft's names, of every layer but those of the first block that end on down_proj."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in model.state_dict().items():
        if name.endswith(tuple(f"{module}{WEIGHT}" for module in modules)) and "0.mlp.down" not in name:
            a, b = adapter_names(name)
            found[a] = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
            found[b] = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
    return found


def with_adapter(
    model: PreTrainedModel, adapter: dict[str, torch.Tensor], scale: float = SCALE
) -> PreTrainedModel:
    """The policy that they make together, whole."""
    merged = deepcopy(model)
    for name, weight in merged.state_dict().items():
        a, b = adapter_names(name)
        if a in adapter:
            weight += scale * adapter[b] @ adapter[a]
    return merged
