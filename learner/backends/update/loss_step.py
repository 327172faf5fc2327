"""The loss of one micro-batch, its sums, and what becomes of the sums of an update, whatever backend
trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.diagnostics import (
    counted,
    off_policy_diagnostics,
    off_policy_sums,
    ratios_by_sequence,
)
from learner.algorithms.losses.objective import (
    DISTANCES,
    LoggedSums,
    Objective,
    losses_and_counts,
    summed,
    token_losses,
)
from learner.algorithms.tokens import TrainedTokens
from learner.backends.output.output_layer import TokenLoss
from learner.data.outcomes import ImportanceRatios
from learner.data.packing import MicroBatch

RATIOS = "ratios_by_sequence"
"""The entry among the sums of a micro-batch that is no sum, but has a column for each sequence."""
OF_PAIRS = "rewards/"
"""Begins the names of sums over pairs of answers."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The objective over the trained tokens of one micro-batch, of which a rank may have a share."""

    objective: Objective
    batch: MicroBatch
    known: TrainedTokens

    @classmethod
    def of(
        cls, objective: Objective, batch: MicroBatch, *, policy_version: int,
        context_group: dist.ProcessGroup | None = None,
    ) -> "MicroBatchLoss":  # fmt: skip
        """Pick the trained tokens. `context_group` are the ranks that share the tokens of each sequence."""
        return cls(objective, batch, TrainedTokens.of(batch, context_group, policy_version=policy_version))

    @property
    def token_loss(self) -> TokenLoss | None:
        """Return what the output layer computes with its log-probs; None if the loss wants all of these
        first."""
        return self._of_rows if self.objective.is_separable else None

    def _of_rows(self, logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return token_losses(self.objective, self.known.with_logprobs(logprobs, entropy, rows))[0].sum()

    def of_output(self, output: Sequence[Tensor]) -> tuple[Tensor, Tensor, LoggedSums]:
        """Return the sum of the losses, the number of trained tokens, and sums to log, from what the model
        returned (learner/backends/output/policy_output.py)."""
        objective = self.objective
        is_fused = objective.is_separable  # then the output layer has computed the loss, which comes first
        logprobs, entropy, *top = output[is_fused:]
        tokens = self.known.with_logprobs(logprobs, entropy, top_logprobs=top[0] if top else None)
        losses, found = losses_and_counts(objective, tokens)
        sums = summed(found, tokens.streams["advantages"])
        loss_sum = output[0] if is_fused else losses.sum()
        # Filled on the device: a copy of a number from the host would make it wait for the forward pass.
        count = torch.full((), len(tokens.labels), dtype=torch.int, device=losses.device)
        left_out = self.batch.left_out_tokens
        counts = {
            "denominator": self.batch.denominator,
            "computed_tokens": self.batch.computed_tokens,
            "left_out_tokens": left_out,
        }
        sums |= {
            "loss": loss_sum.detach(),
            "trained_tokens": count + left_out,
            "entropy": entropy.detach().sum(),
        }
        for name, value in counts.items():
            sums[name] = torch.full((), value, dtype=torch.float64, device=losses.device)
        if objective.loss.facts.of_samples:
            sums |= off_policy_sums(tokens)
            sums[RATIOS] = ratios_by_sequence(tokens, found.get("truncated_tokens"))
        return loss_sum, count, sums


def added_up(per_micro_batch: Sequence[LoggedSums]) -> tuple[list[str], Tensor]:
    """Add up over the micro-batches of this rank, in float64: names and sums."""
    names = [name for name in per_micro_batch[0] if name != RATIOS]
    stacked = torch.stack([torch.stack([sums[name].double() for name in names]) for sums in per_micro_batch])
    return names, stacked.sum(0)


def importance_ratios(
    micro_batches: Sequence[MicroBatch], per_micro_batch: Sequence[LoggedSums],
    context_group: dist.ProcessGroup | None = None,
) -> dict[str, ImportanceRatios]:  # fmt: skip
    """Return the importance ratios of each sample of an update; none of one without trained tokens.

    Args:
        micro_batches: those of this rank.
        per_micro_batch: their sums; none where this rank has no log-probs, or the loss is of no samples.
        context_group: ranks that share the tokens of each sequence, if there are several."""
    found = [sums[RATIOS] for sums in per_micro_batch if RATIOS in sums]
    if not found:
        return {}
    columns = torch.cat(found, dim=1)
    if context_group is not None and context_group.size() > 1:
        dist.all_reduce(columns[:3], group=context_group)
        dist.all_reduce(columns[3:], dist.ReduceOp.MAX, group=context_group)
    names = (name for batch, _ in zip(micro_batches, found, strict=False) for name in batch.names)
    return {
        name: ImportanceRatios(total / tokens, -negated_least, largest, truncated / tokens)
        for name, (tokens, truncated, total, largest, negated_least) in zip(
            names, columns.t().tolist(), strict=False
        )
        if tokens
    }


def pair_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the means over pairs of answers; none where no loss over pairs was computed."""
    pairs = sums["denominator"] or 1.0
    return {name: total / pairs for name, total in sums.items() if name.startswith(OF_PAIRS)}


def step_diagnostics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Return means over so many computed tokens from the sums of an update; none without tokens."""
    if tokens == 0:
        return {}
    means = {"entropy_nats": sums["entropy"] / tokens}
    means |= {f"{name}_fraction": sums[f"{name}_tokens"] / tokens for name in counted(sums)}
    means |= {f"{name}_nats": sums[name] / tokens for name in DISTANCES if name in sums}
    return means | (off_policy_diagnostics(sums) if "ratio" in sums else {})
