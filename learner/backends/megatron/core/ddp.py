"""The wrapper that adds up gradients over the ranks that train other trajectories; its buffers of gradients
are freed while the learner leaves its device to others."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from learner.backends.megatron.core.linear import LINEAR, overlap_exchanges
from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronModule,
    finalize_model_grads,
)
from learner.config.parallel import ParallelConfig


def data_parallel(
    chunks: Sequence[MegatronModule], parallel: ParallelConfig
) -> list[DistributedDataParallel]:
    """Wrap this rank's pieces of the model so that gradients are added up over the data-parallel ranks."""
    config = chunks[0].config
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=True,
    )
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, LINEAR):
            module.gradient_accumulation_fusion = True  # now that the weights have a place for the sum
            if parallel.overlap_exchanges:
                overlap_exchanges(module)
    config.finalize_model_grads_func = finalize_gradients
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def finalize_gradients(
    chunks: list[DistributedDataParallel], _tokens: Tensor | None = None, **settings: object
) -> None:
    """Add up gradients over the ranks that have some of them, as megatron-core does, but for dividing by the
    tokens, which the update does in passing."""
    finalize_model_grads(chunks, None, **settings)


def finish_gathering(layer: torch.nn.Module) -> None:
    """Wait for the updated weights of `layer`, as megatron-core's hooks do when a layer is called.

    It is for a layer that is not called. Without the wait it would compute with weights of before the update,
    and its gather would outlive the pass and replace the next one."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())


def release_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Free the memory for gradients, and what torch keeps; `restore_gradients` comes before their use."""
    for gradients in _gradients(chunks):
        gradients.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def restore_gradients(chunks: Iterable[DistributedDataParallel]) -> None:
    """Allocate the memory of gradients again, not yet zeroed; do nothing if it was not freed. The views of it
    that parameters and optimizer have stay valid."""
    for gradients in _gradients(chunks):
        storage = gradients.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(gradients.nbytes)


def _gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
