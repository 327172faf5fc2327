"""The only module that imports megatron-core, which is untyped and has to be adapted first."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from learner.backends.megatron.core.patches import adapt_megatron_to_cpu, megatron_import_warnings_silenced
from learner.backends.shared import multi_tensor


def gather_uneven(piece: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Lay the pieces of all ranks end to end; that of rank i has `sizes[i]` rows."""
    whole = piece.new_zeros(sum(sizes), *piece.shape[1:])
    torch.split(whole, list(sizes))[group.rank()].copy_(piece)
    dist.all_reduce(whole, group=group)  # each place has one rank's rows and zeros of all others
    return whole


def reduce_scatter_uneven(whole: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Add up `whole` over the ranks, of which rank i keeps `sizes[i]` rows."""
    total = whole.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return torch.split(total, list(sizes))[group.rank()].contiguous()


def allow_uneven_slices(mappings: Any) -> None:
    """Make the autograd functions in megatron-core's `mappings` use the functions above where they must."""

    def replaced(even: Callable[..., Any], uneven: Callable[..., Tensor]) -> Callable[..., Any]:
        def collective(
            tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int] | None = None, *buffer: bool
        ) -> Any:
            if sizes is None or group.size() == 1:
                return even(tensor, group, sizes, *buffer)
            return uneven(tensor, group, sizes)

        return collective

    mappings._gather_along_first_dim = replaced(mappings._gather_along_first_dim, gather_uneven)
    mappings._reduce_scatter_along_first_dim = replaced(
        mappings._reduce_scatter_along_first_dim, reduce_scatter_uneven
    )


adapt_megatron_to_cpu()

with megatron_import_warnings_silenced():
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist_strategy
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.utils import (
        add_prefix_for_sharding,
        extract_sharded_tensors_and_factories,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
        param_and_grad_buffer,
    )
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.attention import Attention, SelfAttention
    from megatron.core.transformer.module import MegatronModule, param_is_not_shared
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import (
        make_sharded_tensors_for_checkpoint,
        sharded_state_dict_default,
    )

if hasattr(dist, "reduce_scatter_single"):  # torch deprecates the names that megatron-core calls
    for module in (param_and_grad_buffer, tensor_parallel.layers, tensor_parallel.mappings):
        module.dist_reduce_scatter_func = dist.reduce_scatter_single
        module.dist_all_gather_func = dist.all_gather_single


def _unless_alone(
    collective: Callable[..., Any], output: Tensor, source: Tensor, *, group: dist.ProcessGroup,
    **others: Any,
) -> Any:  # fmt: skip
    """Exchange nothing in a group of one rank: gloo would copy all gradients, or all weights, twice."""
    if group.size() == 1 and output.data_ptr() == source.data_ptr():
        return None
    return collective(output, source, group=group, **others)


for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
    setattr(param_and_grad_buffer, name, partial(_unless_alone, getattr(param_and_grad_buffer, name)))


def _tensor_parallel_group(group: dist.ProcessGroup | None, **_: object) -> dist.ProcessGroup:
    return group or parallel_state.get_tensor_model_parallel_group()


class _WeightGradients:
    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        multi_tensor.add_product(total, grad.t(), inputs)


tensor_parallel.layers.fused_weight_gradient_mlp_cuda = _WeightGradients


def _swiglu_back(grad: Tensor, gate_and_up: Tensor) -> Tensor:
    """Return the gradient to the bit as autograd has it of silu(gate) * up, where megatron-core rounds
    otherwise."""
    gate, up = gate_and_up.chunk(2, -1)
    grad, found = grad.to(gate.dtype), torch.empty_like(gate_and_up)
    of_gate, of_up = found.chunk(2, -1)
    torch.mul(grad, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
    return found


if torch.cuda.is_available():
    from learner.backends.megatron.core import kernels

    fused_bias_swiglu.swiglu_back = kernels.swiglu_back
else:
    fused_bias_swiglu.swiglu_back = _swiglu_back

# megatron-core's own layers pass None here, and then warn on every call that it is deprecated.
tensor_parallel.layers.get_tensor_model_parallel_group_if_none = _tensor_parallel_group

if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine the name is read, but never bound
    moe_utils.te_general_gemm = None


def _splits_to_numpy(
    dispatcher: MoEAlltoAllTokenDispatcher, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Do on a CPU what the dispatcher does with a side stream: the counts are on the host already."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        splits = getattr(dispatcher, name)
        if isinstance(splits, torch.Tensor):
            setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert


if not torch.cuda.is_available():
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_to_numpy
    allow_uneven_slices(tensor_parallel.mappings)

__all__ = [
    "Attention",
    "CheckpointingConfig",
    "CheckpointingException",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FileSystemWriterAsync",
    "GPTModel",
    "MegatronModule",
    "MegatronOptimizer",
    "MegatronOptimizerConfig",
    "ModuleSpec",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "SelfAttention",
    "SequentialMLP",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "add_prefix_for_sharding",
    "build_module",
    "dist_checkpointing",
    "extract_sharded_tensors_and_factories",
    "filesystem_async",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "is_main_replica",
    "make_sharded_tensors_for_checkpoint",
    "nested_values",
    "parallel_state",
    "param_is_not_shared",
    "save_config",
    "save_preprocess",
    "sharded_state_dict_default",
    "tensor_parallel",
    "torch_dist_strategy",
    "weighted_bias_swiglu_impl",
]
