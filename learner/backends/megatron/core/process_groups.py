"""megatron-core's process groups in the learner's world of processes."""

import math
from typing import TypeVar

import torch
import torch.distributed as dist

from learner.backends.megatron.core.megatron_core import parallel_state, tensor_parallel
from learner.config.parallel import ParallelConfig, WorldConfig, refuse_world
from learner.distributed.process_group import init_process_group, world_size

T = TypeVar("T")


def init_world(parallel: ParallelConfig, timeout_s: float) -> None:
    """Join the world that torchrun describes in the environment, or be a world of one.

    `timeout_s` bounds each collective.
    Raises `ConfigError` when the world cannot be divided as `parallel` says, before it waits for anybody."""
    refuse_world(parallel, world_size())
    init_process_group(timeout_s)
    divide_world(parallel, timeout_s)


def divide_world(parallel: ParallelConfig, timeout_s: float = WorldConfig().collective_timeout_s) -> None:
    """Make megatron-core's process groups, instead of earlier ones. Every rank calls this."""
    refuse_world(parallel, dist.get_world_size())
    _end_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    # Nothing here draws random numbers in training, so this tracker of their states keeps none.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def _end_groups() -> None:
    """End the present groups; megatron-core would only forget them and leave their threads running."""
    for group in (parallel_state._global_process_group_list or [None])[1:]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def close_world() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def data_parallel_sum(values: torch.Tensor) -> torch.Tensor:
    """Add `values` over the ranks that hold other tokens for the same weights, in place. Those are the
    data-parallel ranks and the context ranks; tensor-parallel ranks hold the same tokens."""
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return values


def from_last_stage(value: T) -> T:
    """Return the `value` that the last stage of this rank's pipeline passed; the others' are ignored."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]  # only the last stage has logits, but every stage must take the same decisions
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def tensor_from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Copy the `values` of the last stage of this rank's pipeline, in place; the host does not wait."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return values
