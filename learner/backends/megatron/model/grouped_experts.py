"""The experts of a layer in a few matrix products for all, instead of some for each.

A GPU computes an expert of a small layer faster than a host starts its kernels. torch's grouped product
(`torch.nn.functional.grouped_mm`) takes the tokens of all experts, which lie in their order, and the weights
of all. Weights stay the experts' own parameters, as optimizer, checkpoints and conversion know them; the
products take a copy of them, which is made once more for the backward pass instead of being kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.core import SequentialMLP, tensor_parallel, weighted_bias_swiglu_impl

MULTIPLE = 8
"""The kernel's rows begin at multiples of 16 bytes, so that widths in bfloat16 are multiples of this."""


def has_kernel(tokens: Tensor) -> bool:
    """Tell whether torch has a kernel for grouped products of such tokens."""
    return tokens.is_cuda and tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core is untyped
    """Experts that are computed together where torch has a kernel, and one after another elsewhere."""

    in_fp8 = False
    """Says that their linear layers multiply in fp8, for which there is no grouped product here."""

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, weights_of_tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the experts make of their tokens, times the weights, [n, hidden], and no bias.

        Args:
            tokens: [n, hidden], those of the first expert first.
            tokens_per_expert: int [experts].
            weights_of_tokens: float32 [n].
        """
        if not (len(tokens) and has_kernel(tokens) and self._are_plain()):
            found: tuple[Tensor, Tensor | None] = super().forward(
                tokens, tokens_per_expert, weights_of_tokens
            )
            return found
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        hidden = grouped(tokens, ends, [each.linear_fc1.weight for each in self.local_experts])
        if self.config.bias_activation_fusion:
            hidden = weighted_bias_swiglu_impl(hidden, None, weights_of_tokens[:, None], False)
        else:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = (F.silu(gate) * up * weights_of_tokens[:, None]).to(tokens.dtype)
        return grouped(hidden, ends, [each.linear_fc2.weight for each in self.local_experts]), None

    def _are_plain(self) -> bool:
        """Tell whether an expert is gate, up and down projection of one rank, with SiLU and nothing else, of
        widths that the kernel takes."""
        config = self.config
        if (
            self.in_fp8
            or config.add_bias_linear
            or config.activation_func is not F.silu
            or self.tp_group.size() > 1
        ):
            return False
        linear = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
        return all(
            type(each.linear_fc1) is linear[0]
            and type(each.linear_fc2) is linear[1]
            and not any(size % MULTIPLE for size in each.linear_fc2.weight.shape)
            for each in self.local_experts
        )


def grouped(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return [n, out]: tokens [n, in] of each group times its weight [out, in].

    `ends` are where the tokens of each group end, int32 [groups]."""
    product: Tensor = _Grouped.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Multiply with a copy of the weights, which is given back."""
        ctx.save_for_backward(tokens, ends, *weights)
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens and of each weight, where they are wanted."""
        tokens, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_tokens = F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return of_tokens, None, *(None for _ in weights)
        of_weights = F.grouped_mm(grad.t(), tokens, offs=ends)
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # what a kernel leaves there is not said
        return of_tokens, None, *of_weights.masked_fill_(empty[:, None, None], 0).unbind()
