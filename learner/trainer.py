"""One optimizer step at a time: model, gradients, update, diagnostics."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig

from learner.config import OptimizerConfig, PPOClipLoss, SFTLoss, TISLoss
from learner.conversion.base import State
from learner.conversion.weights import export_hf_weights, load_hf_weights
from learner.corrections import off_policy_diagnostics, off_policy_sums
from learner.losses.select import compute_loss
from learner.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
)
from learner.model import PolicyModel, build_model
from learner.optimizer import apply_gradients, build_optimizer, configure_optimizer
from learner.packing import MicroBatch
from learner.parallel import data_parallel_sum, device

Loss = TISLoss | PPOClipLoss | SFTLoss
Sums = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did, over all data-parallel ranks."""

    loss: float
    """Mean over the trained tokens."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Trained tokens."""
    skipped: bool
    """The loss or the gradient was not finite, or no token was trained: the weights are as before."""
    diagnostics: dict[str, float]
    """Means over the trained tokens; names and units in learner/corrections.py."""


class Trainer:
    """A model and its optimizer on this rank. `learner.parallel.init_world` comes first."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        state: State,
        optimizer: OptimizerConfig,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build the model and load `state`, by Hugging Face names."""
        self.hf_config = hf_config
        self.dtype = dtype
        self.model: PolicyModel = build_model(hf_config, dtype=dtype)
        load_hf_weights(self.model, hf_config, state)
        self.ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            self.model,
        )
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.steps_done = 0
        """Calls of `train_step`, skipped ones included."""
        self.set_optimizer(optimizer)

    def set_optimizer(self, config: OptimizerConfig) -> None:
        """Start over with a fresh optimizer state and warm-up; the weights stay."""
        self.optimizer_config = config
        self.optimizer = build_optimizer(config, self.ddp, self.dtype)
        self.updates_done = 0
        """Updates by this optimizer, which the warm-up counts."""

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, *, temperature: float, policy_version: int
    ) -> StepResult:
        """Update the weights once, on the mean loss over the trained tokens of all ranks and micro-batches.

        Args:
            micro_batches: this rank's part of the batch, at least one.
            loss: which loss to compute.
            temperature: at which the tokens were sampled; 1 for SFT.
            policy_version: of the weights before the update, to tell fresh tokens from stale ones.
        """
        lr = self._next_lr()
        configure_optimizer(self.optimizer, self.optimizer_config, lr)
        sums = self._accumulate_gradients(micro_batches, loss, temperature, policy_version)
        tokens = int(sums["trained_tokens"])
        mean_loss = sums["loss"] / tokens if tokens else 0.0
        norm, updated = apply_gradients(
            self.optimizer,
            self.optimizer_config.clip_grad,
            loss_is_finite=tokens > 0 and math.isfinite(mean_loss),
        )
        self.steps_done += 1
        self.updates_done += updated
        return StepResult(
            loss=mean_loss,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            skipped=not updated,
            diagnostics=_diagnostics(sums, tokens),
        )

    def export(self) -> dict[str, Tensor]:
        """Return copies of the weights by Hugging Face name."""
        return export_hf_weights(self.model, self.hf_config)

    def _next_lr(self) -> float:
        warmup = self.optimizer_config.warmup_steps
        return self.optimizer_config.lr * (min(1.0, (self.updates_done + 1) / warmup) if warmup else 1.0)

    def _accumulate_gradients(
        self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float, policy_version: int
    ) -> dict[str, float]:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        per_micro_batch = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, loss, temperature, policy_version),
            data_iterator=iter(micro_batches),
            model=[self.ddp],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches[0].tokens),
            micro_batch_size=1,
        )
        return _sum_over_ranks(per_micro_batch)


def _forward_step(
    loss: Loss,
    temperature: float,
    policy_version: int,
    batches: Iterator[MicroBatch],
    model: DistributedDataParallel,
) -> tuple[object, object]:
    """Megatron-core's protocol: the model's output, and a function from it to (loss sum, tokens, sums)."""
    batch = next(batches).to(device())
    return model(batch, temperature), partial(_loss_step, loss, policy_version, batch)


def _loss_step(
    loss: Loss, policy_version: int, batch: MicroBatch, output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Sums]:
    logprobs, entropy = output
    loss_sum, sums = compute_loss(loss, logprobs, batch)
    tokens = batch.loss_mask.sum(dtype=torch.int)
    sums |= {"loss": loss_sum.detach(), "trained_tokens": tokens, "entropy": entropy.sum()}
    if not isinstance(loss, SFTLoss):
        sums |= off_policy_sums(
            logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.policy_versions,
            batch.loss_mask,
            policy_version=policy_version,
            truncation_cap=math.inf if loss.truncation_cap is None else loss.truncation_cap,
        )
    return loss_sum, tokens, sums


def _sum_over_ranks(per_micro_batch: Sequence[Sums]) -> dict[str, float]:
    """Add up over micro-batches and data-parallel ranks, in float64 and one collective."""
    names = list(per_micro_batch[0])
    stacked = torch.stack([torch.stack([sums[name].double() for name in names]) for sums in per_micro_batch])
    return dict(zip(names, data_parallel_sum(stacked.sum(0)).tolist(), strict=True))


def _diagnostics(sums: Mapping[str, float], tokens: int) -> dict[str, float]:
    if tokens == 0:
        return {}
    means = {"entropy_nats": sums["entropy"] / tokens}
    if "clipped_tokens" in sums:
        means["clipped_fraction"] = sums["clipped_tokens"] / tokens
    return means | (off_policy_diagnostics(sums) if "ratio" in sums else {})
