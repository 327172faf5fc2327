"""The experts of a layer in a few matrix products for all, instead of some for each.

A GPU computes an expert of a small layer faster than a host starts its kernels. torch's grouped product
(`torch.nn.functional.grouped_mm`) takes the tokens of all experts, which lie in their order, and the weights
of all. Weights stay the experts' own parameters, as optimizer, checkpoints and conversion know them; the
products take a copy of them, which is made once more for the backward pass instead of being kept."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.conversion.base import ADAPTER
from learner.backends.megatron.core.ddp import finish_gathering
from learner.backends.megatron.core.megatron_core import (
    SequentialMLP,
    tensor_parallel,
    weighted_bias_swiglu_impl,
)
from learner.backends.megatron.model.adapter import Adapter, side_by_side
from learner.backends.shared.multi_tensor import MULTIPLE, has_kernel

LAYERS = ("linear_fc1", "linear_fc2")
"""Names of an expert's layers: gate and up projection, and down projection."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core is untyped
    """Experts that are computed together where torch has a kernel, and one after another elsewhere."""

    in_fp8 = False
    """Says that the experts' layers multiply in fp8, for which there is no grouped product here."""

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, weights_of_tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the experts make of their tokens, times the weights, [n, hidden], and no bias.

        Args:
            tokens: [n, hidden], those of the first expert first.
            tokens_per_expert: int [experts].
            weights_of_tokens: float32 [n]."""
        if not (len(tokens) and has_kernel(tokens) and self._are_plain()):
            found: tuple[Tensor, Tensor | None] = super().forward(
                tokens, tokens_per_expert, weights_of_tokens
            )
            return found
        weights_of_tokens = weights_of_tokens[:, None]
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        first, second = ([getattr(each, name) for each in self.local_experts] for name in LAYERS)
        for layer in (*first, *second):
            finish_gathering(layer)
        hidden = self._linear(LAYERS[0], first, tokens, ends)
        if self.config.add_bias_linear:
            hidden = hidden + by_group([layer.bias for layer in first], ends, len(tokens))
        if self.config.bias_activation_fusion:
            hidden = weighted_bias_swiglu_impl(hidden, None, weights_of_tokens, False)
        else:
            hidden = (self._gated(hidden) * weights_of_tokens).to(tokens.dtype)
        outputs = self._linear(LAYERS[1], second, hidden, ends)
        if self.config.add_bias_linear:
            biases = by_group([layer.bias for layer in second], ends, len(tokens))
            outputs = (outputs + biases * weights_of_tokens).to(tokens.dtype)
        return outputs, None

    def _linear(self, name: str, layers: Sequence[Any], inputs: Tensor, ends: Tensor) -> Tensor:
        outputs = grouped(inputs, ends, [layer.weight for layer in layers])
        adapters = self._adapters(name)
        return outputs if adapters[0] is None else _adapted(adapters, layers, inputs, outputs, ends)

    def _adapters(self, name: str) -> list[Any]:
        return [getattr(each, name + ADAPTER, None) for each in self.local_experts]

    def _gated(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        found: Tensor = self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
        return found

    def _are_plain(self) -> bool:
        """Tell whether an expert is gate, up and down projection of one rank and nothing else, of widths that
        the kernel takes, and whether all have the same adapters or none."""
        if self.in_fp8 or self.tp_group.size() > 1:
            return False
        linear = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
        return all(
            type(each.linear_fc1) is linear[0]
            and type(each.linear_fc2) is linear[1]
            and not any(size % MULTIPLE for size in each.linear_fc2.weight.shape)
            for each in self.local_experts
        ) and all(_fit(self._adapters(name)) for name in LAYERS)


def _fit(adapters: Sequence[Adapter | None]) -> bool:
    kinds = [None if each is None else each.ranks for each in adapters]
    return all(one == other for one, other in pairwise(kinds)) and (
        kinds[0] is None or not any(rank is None or rank % MULTIPLE for rank in kinds[0].values())
    )


def _adapted(
    adapters: Sequence[Adapter], layers: Sequence[Any], inputs: Tensor, outputs: Tensor, ends: Tensor
) -> Tensor:
    """Return outputs with what the adapters of all experts make of the inputs.

    Where a layer is gate and up projection, its matrices A are put together, and its matrices B side by side,
    so that all takes two products."""
    pairs = [each.pairs(layer.weight) for each, layer in zip(adapters, layers, strict=True)]
    a = {name: torch.stack([of_expert[name][0] for of_expert in pairs]) for name in pairs[0]}
    b = {name: torch.stack([of_expert[name][1] for of_expert in pairs]) for name in pairs[0]}
    places = dict(zip(b, side_by_side([*b.values()]), strict=True))
    groups, rank = len(adapters), sum(each.shape[1] for each in a.values())
    rows = [
        places[name] if name in places else outputs.new_zeros(groups, size, rank)
        for name, size in adapters[0].outputs.items()
    ]
    low = grouped(inputs, ends, torch.cat([*a.values()], dim=1))
    return outputs.add(grouped(low, ends, torch.cat(rows, dim=1)), alpha=adapters[0].scale)


def grouped(tokens: Tensor, ends: Tensor, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """Return [n, out]: tokens [n, in] of each group times its weight.

    Args:
        tokens: those of the first group first.
        ends: where the tokens of each group end, int32 [groups].
        weights: [groups, out, in], or one [out, in] for each group, of which no copy is kept for the backward
            pass."""
    matrices = (weights,) if isinstance(weights, Tensor) else weights
    product: Tensor = _Grouped.apply(tokens, ends, *matrices)  # type: ignore[no-untyped-call]
    return product


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, _of_all(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of each weight, where they are wanted."""
        tokens, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_tokens = F.grouped_mm(grad, _of_all(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_tokens, None, *(None for _ in weights)
        of_weights = F.grouped_mm(grad.t(), tokens, offs=ends)
        empty = _counts(ends) == 0  # what a kernel leaves there is not said
        of_weights.masked_fill_(empty[:, None, None], 0)
        return of_tokens, None, *((of_weights,) if weights[0].dim() == 3 else of_weights.unbind())


def _of_all(weights: Sequence[Tensor]) -> Tensor:
    """Return [groups, out, in], of one such tensor or of one matrix for each group."""
    return weights[0] if weights[0].dim() == 3 else torch.stack([*weights])


def by_group(vectors: Sequence[Tensor], ends: Tensor, tokens: int) -> Tensor:
    """Return [tokens, width], for each token the vector [width] of its group; `ends` as in `grouped`."""
    found: Tensor = _ByGroup.apply(ends, tokens, *vectors)  # type: ignore[no-untyped-call]
    return found


class _ByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ends: Tensor, tokens: int, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return torch.stack(vectors).repeat_interleave(_counts(ends), dim=0, output_size=tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the sums of the gradients over the tokens of each group, by a product with ones: torch's own
        way would add them up one by one in the dtype of the tokens, in no fixed order."""
        [ends] = ctx.saved_tensors
        number, starts = torch.arange(len(grad), device=grad.device), ends - _counts(ends)
        of_group = (starts[:, None] <= number) & (number < ends[:, None])
        return None, None, *(of_group.to(grad.dtype) @ grad).unbind()


def _counts(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))
