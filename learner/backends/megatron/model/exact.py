"""Has a model of megatron-core compute in exact arithmetic, as transformers' own of the family then does.

Sums are exact, so that it does not matter that projections are fused here and apart there. What is rounded is
rounded in transformers' order."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bus.errors import ConfigError
from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.megatron.model.attention.attention import PackedAttention, PackedSelfAttention
from learner.backends.megatron.model.attention.norm import RMSNorm
from learner.backends.megatron.model.attention.qkv import HeadSettings, heads_by_group, queries_and_keys
from learner.data.packing import empty_micro_batch
from learner.distributed.process_group import device
from storage.exact_arithmetic import functions
from storage.exact_arithmetic.exact_model import refuse_other_operations
from storage.exact_arithmetic.self_check import refuse_other_arithmetic
from storage.exact_arithmetic.softmax import refuse_vocabulary

if TYPE_CHECKING:
    from learner.backends.megatron.model.model import PolicyModel


def make_exact(model: "PolicyModel") -> None:
    """Have a whole float32 model compute in exact arithmetic from now on. Raises `ConfigError` for machines
    and models that cannot."""
    refuse_other_arithmetic(device())
    refuse_vocabulary(model.real_vocab_size)
    gate = model.config
    if gate.activation_func is not F.silu or gate.activation_func_clamp_value is not None:
        raise ConfigError(
            "the model's layers have another activation than SiLU, which model.numerics=exact does not have: "
            "set model.numerics=fast"
        )
    if model.has_states or gate.attention_output_gate:
        raise ConfigError(
            "the model has linear attention, or gates behind attention, which model.numerics=exact does not "
            "have: set model.numerics=fast"
        )
    model.config.activation_func = functions.silu  # the fusion is another kernel
    model.config.bias_activation_fusion = False
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_normed, module)  # type: ignore[method-assign]
        elif isinstance(module, LINEAR):
            module._forward_impl = _linear
        elif isinstance(module, PackedSelfAttention):
            module.split_heads = split_heads
        elif isinstance(module, PackedAttention):
            module.attend = functions.causal_attention
            if module.window is not None or module.sinks is not None:
                raise ConfigError(
                    f"the model's attention has sinks or a sliding window (window={module.window}), which "
                    "model.numerics=exact does not have: set model.numerics=fast"
                )
    model.ropes = tuple(rope._replace(exact=True) for rope in model.ropes)
    model.is_exact = True
    refuse_other_operations(lambda: model.hidden(empty_micro_batch().to(device())), type(model).__name__)


LINEAR = (tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear)


def _linear(
    *, input: Tensor, weight: Tensor, bias: Tensor | None, **_: Any
) -> Tensor:  # megatron-core's name
    return functions.linear(input, weight, bias)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, norm.factors, norm.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension, in transformers' order of operations."""
    return x * functions.rsqrt(functions.mean(x.pow(2)) + eps) * weight


def split_heads(
    mixed: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, rotation: Sequence[Tensor],
    settings: HeadSettings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `split_heads` of qkv.py does."""
    heads = heads_by_group(mixed, settings)
    cos, sin = (angles[:, None] for angles in rotation)
    found = []
    for place, weight in queries_and_keys(heads, query_weight, key_weight):
        x = heads[:, :, place]
        if weight is not None:
            x = rms_norm(x, weight, settings.eps)
        first, second = x.chunk(2, dim=-1)
        found.append((x * cos + torch.cat((second, first), dim=-1) * sin).flatten(1, 2))
    return found[0], found[1], heads[:, :, -1]
