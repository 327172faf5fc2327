"""Tells which layouts of parallel ranks fit a world and a model; everything that does not divide is named."""

from collections.abc import Iterator

from learner.backends.megatron.conversion.base import Shape
from learner.config.parallel import ParallelConfig


def layout_problems(parallel: ParallelConfig, shape: Shape) -> list[str]:
    """List, for people, every size of the model that this layout does not divide."""
    return [
        f"{what}={value} does not divide by {name}={size}: choose a divisor of {value}"
        for what, value, name, size in _divisions(parallel, shape)
        if value % size
    ] + list(_other_problems(parallel, shape))


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Return the size of the vocabulary that tensor-parallel ranks share evenly."""
    return -(-vocab // tensor) * tensor


def layers_of_last_stage(layers: int, stages: int) -> int:
    """Return how many layers the last stage of a pipeline has, which has the output layer besides: as many as
    the others, or fewer where the layers do not divide."""
    return layers - -(-layers // stages) * (stages - 1)


def _divisions(parallel: ParallelConfig, shape: Shape) -> Iterator[tuple[str, int, str, int]]:
    yield "num_attention_heads", shape.heads, "tensor", parallel.tensor
    if shape.groups >= parallel.tensor:
        yield "num_key_value_heads", shape.groups, "tensor", parallel.tensor
    if parallel.virtual_pipeline > 1:
        pieces = parallel.pipeline * parallel.virtual_pipeline
        yield "num_hidden_layers", shape.layers, "pipeline * virtual_pipeline", pieces
    if shape.delta is not None:
        # context ranks share the heads of these layers, as they share the tokens of others
        yield "linear_num_key_heads", shape.delta.key_heads, *_tensor_and_context(parallel)
    if shape.experts is None or not all(shape.experts.sparse_layers):
        yield "intermediate_size", shape.intermediate, "tensor", parallel.tensor
    if shape.experts is not None:
        yield "number of experts", shape.experts.count, "expert", parallel.expert
        yield "width of an expert", shape.experts.intermediate, "expert_tensor", parallel.expert_tensor
        if shape.experts.shared is not None:
            yield "width of the shared expert", shape.experts.shared, "tensor", parallel.tensor


def _tensor_and_context(parallel: ParallelConfig) -> tuple[str, int]:
    if parallel.context == 1:
        return "tensor", parallel.tensor
    return "tensor * context", parallel.tensor * parallel.context


def _other_problems(parallel: ParallelConfig, shape: Shape) -> Iterator[str]:
    tensor, vocab = parallel.tensor, shape.vocab
    if padded_vocabulary(vocab, tensor) // tensor * (tensor - 1) >= vocab:
        yield f"vocab_size={vocab} leaves the last of tensor={tensor} ranks without a token: choose a smaller"
    if parallel.virtual_pipeline == 1 and layers_of_last_stage(shape.layers, parallel.pipeline) < 1:
        yield (
            f"num_hidden_layers={shape.layers} leaves the last of pipeline={parallel.pipeline} stages "
            "without a layer: choose fewer"
        )
    if shape.groups < tensor and (tensor % shape.groups or 2 * shape.groups * shape.head_dim % tensor):
        yield (
            f"tensor={tensor} ranks cannot share num_key_value_heads={shape.groups} of head_dim="
            f"{shape.head_dim} evenly: choose a divisor of {shape.groups}, or a multiple of it that divides "
            f"{2 * shape.groups * shape.head_dim}"
        )
    if shape.experts is None and parallel.expert * parallel.expert_tensor > 1:
        yield (
            f"expert={parallel.expert} and expert_tensor={parallel.expert_tensor}: "
            "the model has no experts, leave both at 1"
        )
    if shape.experts is not None and shape.experts.biased and parallel.expert_tensor > 1:
        yield (
            f"expert_tensor={parallel.expert_tensor}: ranks that share an expert would each add its bias: "
            "set it to 1, and expert to a divisor of the number of experts"
        )
    if shape.joint_norms and tensor > 1:
        yield f"tensor={tensor}: all queries of a token are normed together, on one rank: set it to 1"
    if shape.experts is not None and tensor > 1 and not parallel.sequence:
        yield f"tensor={tensor} of a model with experts needs sequence=true"
