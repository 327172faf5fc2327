"""One update of one model, be it the policy or the critic: its gradients, its norm, and whether it counts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.losses.objective import LoggedSums, Objective
from learner.backends.megatron.core.ddp import restore_gradients
from learner.backends.megatron.core.megatron_core import (
    DistributedDataParallel,
    MegatronOptimizer,
    get_forward_backward_func,
    parallel_state,
)
from learner.backends.megatron.core.process_groups import (
    data_parallel_sum,
    from_last_stage,
    tensor_from_last_stage,
)
from learner.backends.megatron.model.model import HeadPass
from learner.backends.megatron.optimizer.optimizer import gradient_norm, update
from learner.backends.update.decision import decide
from learner.backends.update.loss_step import MicroBatchLoss, added_up
from learner.config.optimizer import OptimizerConfig
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

    `shares` are this rank's parts of them, with idle ones behind."""

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
        real = len(batches)  # batches behind these are idle
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


def accumulate_gradients(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, shares: Sequence[MicroBatch],
    forward_step: Callable[..., Any],
) -> list[LoggedSums]:  # fmt: skip
    """Run all micro-batches forwards and backwards; return the sums of each.

    Args:
        forward_step: (batches, model) to the model's output and a function from it to loss, tokens and sums.

    Returns nothing where the rank is not the last of its pipeline."""
    restore_gradients(chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return get_forward_backward_func()(  # type: ignore[no-any-return]
        forward_step_func=forward_step,
        data_iterator=[iter(shares) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(shares),
        seq_length=len(shares[0].tokens),
        micro_batch_size=1,
    )


def of_all_ranks(per_micro_batch: Sequence[LoggedSums]) -> tuple[list[str], Tensor]:
    """Return names and sums over the micro-batches and over all ranks; nothing where the rank is not the last
    of its pipeline."""
    if not per_micro_batch:
        return [], torch.empty(0)
    names, sums = added_up(per_micro_batch)
    return names, data_parallel_sum(sums)


def forward_step(
    objective: Objective, policy_version: int, head: HeadPass | None, batches: Iterator[MicroBatch],
    model: DistributedDataParallel,
) -> tuple[object, object]:  # fmt: skip
    """Megatron-core's protocol: the model's output, and a function from it to (loss sum, tokens, sums). A
    `head` for the token after the next is trained in passing."""
    batch = next(batches)
    loss = MicroBatchLoss.of(
        objective, batch, policy_version=policy_version,
        context_group=parallel_state.get_context_parallel_group(),
    )  # fmt: skip
    return model(batch, loss.token_loss, head=head), loss.of_output


def update_if_finite(
    optimizer: MegatronOptimizer, config: OptimizerConfig, names: list[str], totals: Tensor, *,
    pipeline: int, before_update: Callable[[], None],
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Update where the loss and the gradient allow it; return the sums and the gradient's norm as numbers.

    The device decides by itself, so that the host waits once, when everything has been put to work.

    Args:
        optimizer: its learning rate is set, and its gradients are those of the sum of all losses.
        config: says where the gradient is clipped.
        names: of the sums; among them are `loss`, `trained_tokens` and `denominator`.
        totals: the sums; names and sums are empty before the last stage of a pipeline.
        pipeline: number of stages.
        before_update: is called when all but the update itself is under way."""
    loss, tokens, denominator = _loss_and_counts(names, totals)
    decision = decide(loss, tokens, denominator, gradient_norm(optimizer), config.clip_grad)
    before_update()
    update(optimizer, divisor=decision.divisor, skip=decision.skip)
    if pipeline > 1:
        names, totals = from_last_stage((names, totals.cpu()))
    *values, norm_value = torch.cat((totals, decision.norm[None].to(totals.device))).tolist()
    return dict(zip(names, values, strict=True)), norm_value


def _loss_and_counts(names: list[str], totals: Tensor) -> Tensor:
    """Send loss, trained tokens and denominator of all ranks, float64 [3], from the last stage to all."""
    values = torch.zeros(3, dtype=torch.float64, device=device())
    if names:
        wanted = ("loss", "trained_tokens", "denominator")
        torch.stack([totals[names.index(name)] for name in wanted], out=values)
    return tensor_from_last_stage(values)
