"""Adapters on routed experts, whose weights transformers has in one tensor for all experts of a layer.

Files have the projections of each expert apart, and each has A and B of its own. Here those of all experts of
a layer lie in one tensor too, expert by expert, which ranks share by experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from learner.backends.fsdp.names import FileNames
from learner.backends.shared.lora import first_a
from learner.backends.shared.multi_tensor import MULTIPLE, has_kernel
from storage.model_files.adapter_names import WEIGHT

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A tensor with some projections of all experts of a layer, one's rows after the other's."""

    module: str
    """Name of the module that computes all experts."""
    tensor: str
    """Name of the tensor in it."""
    projections: Mapping[str, tuple[str, ...]]
    """Names in files of the layers of all experts, by their last name, in the order of rows."""


def expert_stacks(hf_model: PreTrainedModel, names: FileNames) -> Iterator[ExpertStack]:
    """Yield the tensors of experts that may have adapters: gated, without biases, and apart in files."""
    for path, module in hf_model.named_modules():
        if not _is_plain(module):
            continue
        for tensor in (GATE_UP, DOWN):
            files = [name.removesuffix(WEIGHT) for name in names.tensors[f"{path}.{tensor}"].files]
            count = len(getattr(module, tensor))
            if len(files) % count == 0:
                rows = [tuple(files[first : first + count]) for first in range(0, len(files), count)]
                yield ExpertStack(path, tensor, {row[0].rpartition(".")[2]: row for row in rows})


def _is_plain(module: Any) -> bool:
    return (
        getattr(module, "has_gate", False)
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or module.has_post_expert_norm)
    )


class StackedPairs(torch.nn.Module):
    """A and B of one projection of all experts."""

    def __init__(self, layers: Sequence[str], rank: int, inputs: int, outputs: int) -> None:
        """Begin with B as 0; `layers` are the experts' by their names in files."""
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.stack([first_a(layer, rank, inputs) for layer in layers]))
        self.lora_B = torch.nn.Parameter(torch.zeros(len(layers), outputs, rank))


def pairs_name(projection: str) -> str:
    """Return the name in the experts' module of the adapters of a projection."""
    return f"lora_{projection}"


def adapt_experts(
    experts: Any, stacks: Sequence[ExpertStack], chosen: set[str], rank: int, scale: float
) -> None:
    """Give experts adapters of those projections of `stacks` that are `chosen`, by their last names."""
    for stack in stacks:
        _, rows, inputs = getattr(experts, stack.tensor).shape
        for projection, layers in stack.projections.items():
            if projection in chosen:
                outputs = rows // len(stack.projections)
                experts.add_module(pairs_name(projection), StackedPairs(layers, rank, inputs, outputs))
    projections = {stack.tensor: list(stack.projections) for stack in stacks}
    experts.forward = partial(_forward, experts, projections, scale)


def _forward(
    experts: Any, projections: Mapping[str, Sequence[str]], scale: float,
    hidden: Tensor, chosen: Tensor, weights: Tensor,
) -> Tensor:  # fmt: skip
    """Return what experts with adapters make of tokens [T, hidden], which go to the `chosen` [T, k]."""
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=len(experts.gate_up_proj))
    tokens = hidden[order // chosen.shape[1]]
    linear = partial(_adapted, experts, projections, scale, counts)
    found = linear(DOWN, experts._apply_gate(linear(GATE_UP, tokens)))
    found = found * weights.flatten()[order][:, None]
    return found[order.argsort()].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


def _adapted(
    experts: Any, projections: Mapping[str, Sequence[str]], scale: float, counts: Tensor,
    tensor: str, inputs: Tensor,
) -> Tensor:  # fmt: skip
    outputs = grouped_linear(inputs, getattr(experts, tensor), counts)
    pairs = [getattr(experts, pairs_name(each), None) for each in projections[tensor]]
    if not any(pairs):
        return outputs
    width = outputs.shape[1] // len(pairs)
    added = [
        outputs.new_zeros(len(outputs), width)
        if pair is None
        else grouped_linear(grouped_linear(inputs, pair.lora_A, counts), pair.lora_B, counts)
        for pair in pairs
    ]
    return outputs.add(torch.cat(added, dim=1), alpha=scale)


def grouped_linear(tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return [n, out]: tokens [n, in] of each expert times its weight [experts, out, in]. `counts` are tokens
    of each expert, which lie in their order."""
    if has_kernel(tokens) and not any(size % MULTIPLE for size in weight.shape[1:]):
        if weight.requires_grad:  # what a kernel leaves in gradients of experts without tokens is not said
            weight = weight.masked_fill((counts == 0)[:, None, None], 0)
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
    of_experts = zip(torch.split(tokens, counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in of_experts])
