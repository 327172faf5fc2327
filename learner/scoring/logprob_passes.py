"""Passes that only compute log-probs: without gradient or stored activations, with their own token budget."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithms.objective import Objective
from learner.backends.megatron.core import DistributedDataParallel, get_forward_backward_func, parallel_state
from learner.backends.megatron.process_groups import device, from_last_stage
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.data.packing import MicroBatch, Sample, first_fit, micro_batch_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Result of a pass for a sample of L tokens; NaN at tokens that are not trained."""

    logprobs: np.ndarray
    """float32 [L], nats."""
    entropy: np.ndarray
    """float32 [L], nats, of the distribution that the token was drawn from."""


def with_logprobs(
    trainer: Trainer, samples: Sequence[Sample], learner: LearnerConfig, *, temperature: float
) -> list[Sample]:
    """Add log-probs under the other policies that the objective wants, a pass each. Every rank calls this.

    The current policy is the proximal one of the updates that follow (arXiv:2110.00641).
    """
    budget = learner.batch.logprob_tokens_per_micro_batch or learner.batch.tokens_per_micro_batch
    scored = list(samples)
    for tag in Objective.of(learner).policies:
        found = score(
            trainer,
            samples,
            policy=None if tag == "proximal" else tag,
            temperature=temperature,
            tokens_per_micro_batch=budget,
        )
        for i, scores in enumerate(found):
            found_logprobs: dict[str, Any] = {f"{tag}_logprobs": scores.logprobs}
            scored[i] = replace(scored[i], **found_logprobs)
    return scored


def score(
    trainer: Trainer,
    samples: Sequence[Sample],
    *,
    policy: str | None = None,
    temperature: float,
    tokens_per_micro_batch: int,
) -> list[Scores]:
    """Compute log-probs and entropy of the trained tokens. Every rank calls this.

    Args:
        trainer: its weights are bit for bit the same afterwards.
        samples: the samples of this data-parallel rank, equal on the ranks that share a model with it.
        policy: tag of a frozen policy; `None` is the current one.
        temperature: the sampling temperature of the tokens.
        tokens_per_micro_batch: budget of a pack, by first fit; a longer sample is alone in its own.
    """
    if policy is not None:
        with trainer.frozen.in_place(policy):
            return score(
                trainer, samples, temperature=temperature, tokens_per_micro_batch=tokens_per_micro_batch
            )
    bins = first_fit([len(sample.token_ids) for sample in samples], tokens_per_micro_batch)
    batches = [micro_batch_of([samples[i] for i in members]) for members in bins]
    found: dict[int, Scores] = {}
    for members, batch, values in zip(bins, batches, _forward(trainer, batches, temperature), strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=1), strict=True):
            found[i] = _scores(of_sample)
    return [found[i] for i in range(len(samples))]


@torch.no_grad()
def _forward(trainer: Trainer, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
    """Compute log-probs and entropy [2, T] of each micro-batch, on the host of every rank."""
    shares = trainer.shares(batches)

    def forward_step(shares: Iterator[MicroBatch], model: DistributedDataParallel) -> tuple[Tensor, None]:
        output = model(next(shares), temperature)  # before the last stage: hidden states
        return output if isinstance(output, Tensor) else torch.stack(output), None

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(shares) for _ in trainer.ddp],
        model=trainer.ddp,
        num_microbatches=len(shares),
        seq_length=len(shares[0].tokens),
        micro_batch_size=1,
        forward_only=True,
    )
    whole = []
    if outputs:
        real = len(batches)  # the micro-batches behind them are idle ones
        whole = [_whole(*each) for each in zip(batches, shares[:real], outputs[:real], strict=True)]
    return from_last_stage(whole)


def _whole(batch: MicroBatch, share: MicroBatch, values: Tensor) -> Tensor:
    """Gather the shares [2, N] of the context ranks to all tokens [2, T]; NaN where nothing is trained."""
    sequence, offset = share.sequence_of_token[share.trained], share.position_ids[share.trained]
    whole = torch.zeros(2, len(batch.tokens), dtype=values.dtype, device=device())
    whole[:, batch.cu_seqlens.to(device())[sequence] + offset] = values
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:  # each rank filled in the predictions of its own tokens: the others are 0 in the sum
        dist.all_reduce(whole, group=group)
    return torch.where(batch.loss_mask, whole.cpu(), torch.nan)


def _scores(values: Tensor) -> Scores:
    """Shift by one: position t holds the prediction of token t + 1."""
    first = torch.full((2, 1), torch.nan)
    logprobs, entropy = torch.cat((first, values[:, :-1]), dim=1).numpy()
    return Scores(logprobs=logprobs, entropy=entropy)
