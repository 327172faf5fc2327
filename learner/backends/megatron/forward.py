"""Passes that only compute log-probs, or a critic's values: without gradient or stored activations."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    get_forward_backward_func,
    parallel_state,
)
from learner.backends.megatron.core.process_groups import from_last_stage
from learner.data.packing import MicroBatch
from learner.distributed.process_group import device


@torch.no_grad()
def forward_logprobs(
    chunks: Sequence[DistributedDataParallel], batches: Sequence[MicroBatch], shares: Sequence[MicroBatch],
    *, top: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probs and entropy [2, T] of each of `batches`, on the host of every rank.

    Of a critic they are the values, [1, T]. With `top` they are the ids and log-probs of the likeliest
    tokens, and the log-prob of all others together, [2 top + 1, T] (learner/backends/contract/backend.py).

    `shares` are this rank's parts of them, with idle ones behind.
    """

    def forward_step(shares: Iterator[MicroBatch], model: DistributedDataParallel) -> tuple[Tensor, None]:
        output = model(next(shares), top=top)  # hidden states, before the last stage of a pipeline
        if isinstance(output, Tensor):
            return output, None
        if top:
            return torch.cat([values.float().t() for values in output]), None
        return torch.stack(output), None

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(shares) for _ in chunks],
        model=chunks,
        num_microbatches=len(shares),
        seq_length=len(shares[0].tokens),
        micro_batch_size=1,
        forward_only=True,
    )
    found = []
    if outputs:
        real = len(batches)  # those behind them are idle
        found = [_of_all_tokens(*each) for each in zip(batches, shares[:real], outputs[:real], strict=True)]
    return from_last_stage(found)


def _of_all_tokens(batch: MicroBatch, share: MicroBatch, values: Tensor) -> Tensor:
    """Gather the shares [k, N] of the context ranks to all tokens [k, T]; NaN where nothing is trained."""
    sequence, offset = share.sequence_of_token[share.trained], share.position_ids[share.trained]
    found = torch.zeros(len(values), len(batch.tokens), dtype=values.dtype, device=device())
    found[:, batch.cu_seqlens.to(device())[sequence] + offset] = values
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(found, group=group)  # each rank has zeros where the others have values
    return torch.where(batch.loss_mask, found.cpu(), torch.nan)
