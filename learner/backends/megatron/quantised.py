"""Finds the matrices of megatron-core's model that quantised engines have otherwise; products in fp8."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import Rule, Shape
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.linear import LINEAR, added_to_main
from learner.backends.megatron.core.megatron_core import tensor_parallel
from learner.backends.megatron.model.grouped_experts import GroupedExperts
from learner.backends.megatron.weights.rank_weights import (
    EXPERT,
    Cut,
    Slice,
    part_shapes_of,
    parts_of,
    slice_of,
    slices_of,
    tensor_group,
)
from learner.backends.megatron.weights.stacks import in_files, places_in, stacks_of
from learner.backends.quantised.matmul import Fp8Linear, refuse_sizes
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import Mixed, RoundedWeights, WeightPart
from storage.weights.quantisation import is_quantised

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
    """Compute what megatron-core's function of these arguments does. Ranks exchange inputs and their
    gradients before and after the products, and not beside them."""
    if sequence_parallel:
        input = tensor_parallel.gather_from_sequence_parallel_region(
            input, tensor_parallel_output_grad=True, group=tp_group
        )
    elif allreduce_dgrad:
        input = tensor_parallel.copy_to_tensor_model_parallel_region(input, group=tp_group)
    accumulate = added_to_main if gradient_accumulation_fusion else None
    output: Tensor = Fp8Linear.apply(input, weight, accumulate)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


def rounded_weights(
    chunks: Sequence[torch.nn.Module], hf_config: PretrainedConfig, rounding: Rounding, dtype: torch.dtype
) -> RoundedWeights:
    """Return the weights of this rank's chunks, which are in `dtype`, and what engines make of them. The
    parameters must stay where they are. Raises `ConfigError` where they cannot be quantised so."""
    shape, slices = shape_of(hf_config), slices_of(chunks)
    places = places_in(stacks_of(hf_config))
    parts: list[WeightPart] = []
    mixed: list[Mixed] = []
    for rule in family_of(hf_config).rules(shape):
        mine = slices.get(rule.megatron)
        if mine is None:
            continue
        wholes = dict(zip(rule.parts, part_shapes_of(rule, mine, shape), strict=True))
        rounding.refuse(in_files(wholes, places))
        if not any(is_quantised(name, whole) for name, whole in wholes.items()):
            continue
        if rule.layout.mixes(shape, mine.ranks):
            mixed.append(_mixed(rule, mine, shape))
        else:
            parts.extend(_parts(rule, mine, shape, wholes))
    return RoundedWeights(rounding, parts, mixed, dtype)


def _parts(
    rule: Rule, mine: Slice, shape: Shape, wholes: Mapping[str, tuple[int, ...]]
) -> Iterator[WeightPart]:
    group = tensor_group(EXPERT.search(rule.megatron) is not None) if mine.ranks > 1 else None
    views = rule.layout.split(mine.parameter, mine.shape(shape))
    for (name, whole), view in zip(wholes.items(), views, strict=True):
        if is_quantised(name, whole):
            rows, columns = (n // mine.ranks if i == mine.dimension else n for i, n in enumerate(whole))
            yield WeightPart(
                view,
                (rows, columns),
                (whole[0], whole[1]),
                row=mine.rank * rows if mine.dimension == 0 else 0,
                column=mine.rank * columns if mine.dimension == 1 else 0,
                group=group,
            )


def _mixed(rule: Rule, mine: Slice, shape: Shape) -> Mixed:
    group = tensor_group(EXPERT.search(rule.megatron) is not None)
    cuts = [Cut(mine.dimension, mine.ranks, rank, mine.sizes) for rank in range(mine.ranks)]

    def gathered() -> dict[str, Tensor]:
        pieces = [torch.empty_like(mine.parameter) for _ in cuts]
        dist.all_gather(pieces, mine.parameter.contiguous(), group=group)
        return dict(parts_of(rule, list(zip(pieces, cuts, strict=True)), shape))

    return Mixed(mine.parameter, gathered, partial(slice_of, rule, cuts[mine.rank], shape=shape))
