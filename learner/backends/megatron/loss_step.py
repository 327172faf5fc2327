"""The loss of one micro-batch in megatron-core's schedule, and the sums of an update over all of them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from learner.algorithms.diagnostics import COUNTED, off_policy_diagnostics, off_policy_sums
from learner.algorithms.objective import DISTANCES, Objective, token_losses
from learner.algorithms.tokens import TrainedTokens
from learner.backends.megatron.core import DistributedDataParallel, parallel_state
from learner.backends.megatron.process_groups import data_parallel_sum
from learner.config.loss import SFTLoss
from learner.data.packing import MicroBatch

Sums = dict[str, Tensor]


def forward_step(
    objective: Objective,
    policy_version: int,
    batches: Iterator[MicroBatch],
    model: DistributedDataParallel,
) -> tuple[object, object]:
    """Megatron-core's protocol: the model's output, and a function from it to (loss sum, tokens, sums)."""
    batch = next(batches)
    known = TrainedTokens.of(
        batch, parallel_state.get_context_parallel_group(), policy_version=policy_version
    )
    loss_step = partial(_loss_step, objective, known, batch.denominator)
    if not objective.is_separable:  # the loss wants the log-probs of all tokens first
        return model(batch), loss_step

    def token_loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return token_losses(objective, known.with_logprobs(logprobs, entropy, rows))[0].sum()

    return model(batch, token_loss), loss_step


def _loss_step(
    objective: Objective,
    known: TrainedTokens,
    denominator: float,
    output: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Sums]:
    *fused, logprobs, entropy = output
    tokens = known.with_logprobs(logprobs, entropy)
    losses, sums = token_losses(objective, tokens)
    loss_sum = fused[0] if fused else losses.sum()
    # Filled on the device: a copy of a number from the host would make it wait for the forward pass.
    count = torch.full((), len(tokens.labels), dtype=torch.int, device=losses.device)
    sums |= {
        "loss": loss_sum.detach(),
        "trained_tokens": count,
        "denominator": torch.full((), denominator, dtype=torch.float64, device=losses.device),
        "entropy": entropy.detach().sum(),
    }
    if not isinstance(objective.loss, SFTLoss):
        sums |= off_policy_sums(tokens)
    return loss_sum, count, sums


def sum_over_ranks(per_micro_batch: Sequence[Sums]) -> tuple[list[str], Tensor]:
    """Add up over micro-batches and data-parallel ranks, in float64 and one collective: names and sums."""
    names = list(per_micro_batch[0])
    stacked = torch.stack([torch.stack([sums[name].double() for name in names]) for sums in per_micro_batch])
    return names, data_parallel_sum(stacked.sum(0))


def step_diagnostics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Means over the trained tokens from the sums of an update; none when no token was trained."""
    if tokens == 0:
        return {}
    means = {"entropy_nats": sums["entropy"] / tokens}
    for name in COUNTED:
        if f"{name}_tokens" in sums:
            means[f"{name}_fraction"] = sums[f"{name}_tokens"] / tokens
    means |= {f"{name}_nats": sums[name] / tokens for name in DISTANCES if name in sums}
    return means | (off_policy_diagnostics(sums) if "ratio" in sums else {})
