"""Has megatron-core's linear layers multiply in fp8."""

from collections.abc import Sequence

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.core.ddp import LINEAR
from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.megatron.model.grouped_experts import GroupedExperts
from learner.backends.quantised.matmul import Fp8Linear, refuse_sizes
from learner.backends.shared import multi_tensor

log = structlog.get_logger()
SLOWER = (
    "learner.fp8_matmul=true has no product for the experts of a layer together, and small ones may take "
    "longer so than in bfloat16: compare the tokens/s of both, or set it to false"
)


def multiply_in_fp8(chunks: Sequence[torch.nn.Module]) -> None:
    """Change the linear layers of the transformer blocks; embeddings, the output layer and routers stay.

    Experts, which would be computed together otherwise, are then computed one after another: the first rank
    says so. Raises `ConfigError` for a layer whose sizes do not allow it."""
    experts = 0
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, LINEAR) and "decoder.layers." in name:
                refuse_sizes(name, module.weight)
                module._forward_impl = _linear
            if isinstance(module, GroupedExperts):
                module.in_fp8 = True
                experts = module.num_local_experts
    if experts and dist.get_rank() == 0:
        log.warning("experts_one_after_another", experts_of_a_rank=experts, reason=SLOWER)


def _linear(
    input: Tensor,
    weight: Tensor, bias: Tensor | None, *, gradient_accumulation_fusion: bool, allreduce_dgrad: bool,
    sequence_parallel: bool, tp_group: torch.distributed.ProcessGroup, **_: object,
) -> Tensor:  # fmt: skip
    """Compute what megatron-core's function of these arguments does.

    Ranks exchange inputs and their gradients before and after the products, and not beside them."""
    if sequence_parallel:
        input = tensor_parallel.gather_from_sequence_parallel_region(
            input, tensor_parallel_output_grad=True, group=tp_group
        )
    elif allreduce_dgrad:
        input = tensor_parallel.copy_to_tensor_model_parallel_region(input, group=tp_group)
    accumulate = _added_to_main if gradient_accumulation_fusion else None
    output: Tensor = Fp8Linear.apply(input, weight, accumulate)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


def _added_to_main(weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """Add the gradient of a weight to its sum in float32; return what hooks of the data-parallel wrapper wait
    for, whose contents mean nothing."""
    multi_tensor.add_product(weight.main_grad, gradient.t(), inputs)  # type: ignore[attr-defined]
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
