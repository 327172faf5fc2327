"""Low-rank adapters written from the formula, on models of transformers."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model."


class Adapted(torch.nn.Module):
    """W x + scale * B A x, with W frozen; with `magnitude`, rows of this length (arXiv:2402.09353, eq. 5)."""

    def __init__(
        self, weight: Tensor, a: Tensor, b: Tensor, scale: float, *,
        magnitude: Tensor | None = None, bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_buffer("frozen", weight)
        self.register_buffer("constant", bias)
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())
        self.magnitude = None if magnitude is None else torch.nn.Parameter(magnitude.clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        outputs = x @ self.frozen.T + self.scale * (x @ self.a.T @ self.b.T)
        if self.magnitude is not None:
            together = self.frozen + self.scale * self.b @ self.a
            outputs = outputs * (self.magnitude / together.detach().norm(dim=1))
        return outputs if self.constant is None else outputs + self.constant


class ExpertsApart(torch.nn.Module):
    """The routed experts of a layer as modules of their own, each with three linear layers."""

    def __init__(self, together: torch.nn.Module) -> None:
        super().__init__()
        for number, (gate_up, down) in enumerate(
            zip(together.gate_up_proj.detach(), together.down_proj.detach(), strict=True)
        ):
            self.add_module(str(number), expert := torch.nn.Module())
            for name, weight in zip(LINEAR[-3:], (*gate_up.chunk(2), down), strict=True):
                layer = torch.nn.Linear(*weight.shape[::-1], bias=False)
                layer.weight = torch.nn.Parameter(weight)
                expert.add_module(name, layer)

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for number, expert in self.named_children():
            share = (weights * (chosen == int(number))).sum(-1, keepdim=True)
            gated = torch.nn.functional.silu(expert.gate_proj(hidden)) * expert.up_proj(hidden)
            total = total + share * expert.down_proj(gated)
        return total


def take_experts_apart(model: PreTrainedModel) -> None:
    """Give each routed expert of a model layers of its own, by the names that files have."""
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith(("Experts", "NaiveMoe")):
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, ExpertsApart(module))


def adapt(model: PreTrainedModel, tensors: dict[str, Tensor], scale: float) -> dict[str, Adapted]:
    """Freeze a model and give it the adapters `tensors`, by peft's names; return them by their modules."""
    if any(".experts." in name for name in tensors):
        take_experts_apart(model)
    model.requires_grad_(False)
    adapted = {}
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if ".lora_A." in name]:
        path, _, last = name.removeprefix(PEFT).rpartition(".")
        parent = model.get_submodule(path)
        linear = getattr(parent, last)
        layer = Adapted(
            linear.weight.detach(), tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"], scale,
            magnitude=tensors.get(f"{name}.lora_magnitude_vector"),
            bias=None if linear.bias is None else linear.bias.detach(),
        )  # fmt: skip
        setattr(parent, last, layer)
        adapted[name] = layer
    return adapted


def tensors_of(adapted: dict[str, Adapted]) -> dict[str, Tensor]:
    """Return A and B, and lengths of rows, by peft's names."""
    found = {f"{name}.lora_A.weight": layer.a.detach() for name, layer in adapted.items()}
    found |= {f"{name}.lora_B.weight": layer.b.detach() for name, layer in adapted.items()}
    return found | {
        f"{name}.lora_magnitude_vector": layer.magnitude.detach()
        for name, layer in adapted.items()
        if layer.magnitude is not None
    }
