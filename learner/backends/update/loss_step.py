"""The loss of one micro-batch, its sums, and what becomes of the sums of an update, whatever backend
trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.diagnostics import counted, off_policy_diagnostics, off_policy_sums
from learner.algorithms.losses.objective import DISTANCES, LoggedSums, Objective, token_losses
from learner.algorithms.tokens import TrainedTokens
from learner.backends.output.output_layer import TokenLoss
from learner.data.packing import MicroBatch

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
        losses, sums = token_losses(objective, tokens)
        loss_sum = output[0] if is_fused else losses.sum()
        # Filled on the device: a copy of a number from the host would make it wait for the forward pass.
        count = torch.full((), len(tokens.labels), dtype=torch.int, device=losses.device)
        counts = {"denominator": self.batch.denominator, "computed_tokens": self.batch.computed_tokens}
        sums |= {"loss": loss_sum.detach(), "trained_tokens": count, "entropy": entropy.detach().sum()}
        for name, value in counts.items():
            sums[name] = torch.full((), value, dtype=torch.float64, device=losses.device)
        if objective.loss.facts.of_samples:
            sums |= off_policy_sums(tokens)
        return loss_sum, count, sums


def added_up(per_micro_batch: Sequence[LoggedSums]) -> tuple[list[str], Tensor]:
    """Add up over the micro-batches of this rank, in float64: names and sums."""
    names = list(per_micro_batch[0])
    stacked = torch.stack([torch.stack([sums[name].double() for name in names]) for sums in per_micro_batch])
    return names, stacked.sum(0)


def pair_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the means over pairs of answers; none where no loss over pairs was computed."""
    pairs = sums["denominator"] or 1.0
    return {name: total / pairs for name, total in sums.items() if name.startswith(OF_PAIRS)}


def step_diagnostics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Means over the trained tokens from the sums of an update; none when no token was trained."""
    if tokens == 0:
        return {}
    means = {"entropy_nats": sums["entropy"] / tokens}
    means |= {f"{name}_fraction": sums[f"{name}_tokens"] / tokens for name in counted(sums)}
    means |= {f"{name}_nats": sums[name] / tokens for name in DISTANCES if name in sums}
    return means | (off_policy_diagnostics(sums) if "ratio" in sums else {})
