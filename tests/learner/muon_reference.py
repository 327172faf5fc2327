"""Muon beside AdamW, written from the papers: singular values instead of an iteration of matrices."""

import re

import torch
from torch import Tensor

NOT_HIDDEN = re.compile(r"embed|lm_head|norm|bias|(gate|router)\.weight|shared_expert_gate|score|sinks")


def expected_step(momentum: Tensor) -> Tensor:
    """Return 0.2 sqrt(max(rows, columns)) U p(S) V^T in float64, p being five times the quintic."""
    u, s, v = torch.linalg.svd(momentum.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)  # an expert that no token reached has zeros
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return 0.2 * max(momentum.shape) ** 0.5 * (u * s) @ v


class ReferenceMuon:
    """Updates the matrices of a transformers model, and has torch's AdamW update the rest."""

    def __init__(self, model: torch.nn.Module, config) -> None:
        named = dict(model.named_parameters())
        self.config = config
        self.interleaved = model.config.model_type == "gpt_oss"
        self.hidden = {name: each for name, each in named.items() if not NOT_HIDDEN.search(name)}
        self.momenta = {name: torch.zeros_like(each).double() for name, each in self.hidden.items()}
        rest = {name: each for name, each in named.items() if name not in self.hidden}
        exempt = [each for name, each in rest.items() if each.dim() == 1 or name.endswith("bias")]
        decayed = [each for each in rest.values() if not any(each is other for other in exempt)]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": exempt, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps)
        self.param_groups = self.adamw.param_groups

    def zero_grad(self) -> None:
        for each in (*self.hidden.values(), *(p for group in self.param_groups for p in group["params"])):
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        lr = self.param_groups[0]["lr"]
        for name, weight in self.hidden.items():
            gradient = weight.grad.double()
            self.momenta[name] = self.config.momentum * self.momenta[name] + gradient
            ahead = self.config.momentum * self.momenta[name] + gradient
            step = torch.empty_like(ahead)
            for into, matrix in matrices(name, step, ahead, interleaved=self.interleaved):
                into.copy_(expected_step(matrix))
            kept = weight.double() * (1 - lr * self.config.weight_decay)
            weight.copy_(kept - lr * step)


def matrices(name: str, *tensors: Tensor, interleaved: bool) -> list[tuple[Tensor, ...]]:
    """Return the matrices of a tensor of transformers, which keeps those of all experts of a layer in one.

    Gate and up are halves of its rows, or `interleaved`: columns in turn, as in gpt-oss."""
    if tensors[0].dim() == 2:
        return [tensors]
    found = [tuple(tensor[expert] for tensor in tensors) for expert in range(len(tensors[0]))]
    if name.endswith("gate_up_proj") and interleaved:
        found = [tuple(each[:, half::2] for each in those) for those in found for half in (0, 1)]
    elif name.endswith("gate_up_proj"):
        found = [tuple(each.chunk(2)[half] for each in those) for those in found for half in (0, 1)]
    return found
