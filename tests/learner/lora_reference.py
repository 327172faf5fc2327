"""Low-rank adapters written from the formula, on models of transformers."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model."


class Adapted(torch.nn.Module):
    """W x + scale * B A x, with W frozen."""

    def __init__(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("frozen", weight)
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.frozen.T + self.scale * (x @ self.a.T @ self.b.T)


def adapt(model: PreTrainedModel, tensors: dict[str, Tensor], scale: float) -> dict[str, Adapted]:
    """Freeze a model and give it the adapters `tensors`, by peft's names; return them by their modules."""
    model.requires_grad_(False)
    adapted = {}
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]:
        path, _, last = name.removeprefix(PEFT).rpartition(".")
        parent = model.get_submodule(path)
        weight = getattr(parent, last).weight.detach()
        layer = Adapted(weight, tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"], scale)
        setattr(parent, last, layer)
        adapted[name] = layer
    return adapted


def tensors_of(adapted: dict[str, Adapted]) -> dict[str, Tensor]:
    """Return A and B by peft's names."""
    pairs = [(f"{name}.lora_A.weight", layer.a.detach()) for name, layer in adapted.items()]
    return dict(pairs + [(f"{name}.lora_B.weight", layer.b.detach()) for name, layer in adapted.items()])
