"""The supervised stage before reinforcement learning, the same for the learner and for who repeats it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from bus.process.work_progress import tracked
from learner.algorithms.losses.objective import Objective, token_losses
from learner.algorithms.tokens import TrainedTokens
from learner.backends.contract.backend import Backend, StepResult
from learner.backends.update.loss_step import added_up, pair_means
from learner.config.batch import BatchConfig
from learner.config.process_settings import LearnerSettings
from learner.config.warmup import WarmupConfig
from learner.data.data_parallel import equally_many
from learner.data.demonstrations import Demonstrations
from learner.data.packing import MicroBatch, Sample, pack, pack_pairs
from learner.distributed.process_group import device, use_threads
from learner.logprobs.frozen_policies import hold_frozen_policies
from learner.logprobs.logprobs import score
from learner.progress.progress import Progress


def warm_up_step(
    backend: Backend, settings: LearnerSettings, demonstrations: Demonstrations | None, step: int
) -> StepResult:
    """Take one optimizer step on the `step`-th batch of demonstrations, from 0. Every rank calls this."""
    if demonstrations is None:
        raise RuntimeError(
            "there are no demonstrations to warm up on: give them with --warmup.demonstrations"
        )
    use_threads(settings.warmup.threads, backend.size_bytes)
    ranks = backend.data_parallel_group
    size = settings.warmup.batch_size
    samples = demonstrations.step(step, size, share=ranks.rank(), shares=ranks.size())
    batch = settings.learner.batch
    batches = _packed(backend, settings.warmup, batch, samples, batch.token_budget)
    return backend.train_step(batches, settings.warmup.loss, policy_version=0)


def heldout_figures(
    backend: Backend, warmup: WarmupConfig, batch: BatchConfig, demonstrations: Demonstrations
) -> dict[str, float]:
    """Return the mean loss of held-out demonstrations, and the means over pairs if they are such. Every rank
    calls this; nothing of the backend changes."""
    ranks, objective = backend.data_parallel_group, Objective(warmup.loss)
    samples = demonstrations.all(share=ranks.rank(), shares=ranks.size())
    batches = _packed(backend, warmup, batch, samples, batch.logprob_token_budget)
    found = []
    for packed, values in zip(batches, backend.logprobs(batches), strict=True):
        tokens = TrainedTokens.of(packed).with_logprobs(*values[:, packed.trained])
        losses, sums = token_losses(objective, tokens)
        counted = {"loss": losses.sum(dtype=torch.float64), "denominator": torch.tensor(packed.denominator)}
        found.append(sums | counted)
    names, totals = added_up(found)
    totals = totals.to(device())
    dist.all_reduce(totals, group=ranks)
    means = dict(zip(names, totals.tolist(), strict=True))
    return {"loss_nats": means["loss"] / means["denominator"], **pair_means(means)}


def _packed(
    backend: Backend, warmup: WarmupConfig, batch: BatchConfig, samples: Sequence[Sample], budget: int
) -> list[MicroBatch]:
    facts = warmup.loss.facts
    if facts.of_scores:
        samples = [_scored_at_end(sample, backend.hf_config.pad_token_id) for sample in samples]
    if facts.to_reference:
        scores = score(
            backend, samples, policy="reference", tokens_per_micro_batch=batch.logprob_token_budget
        )
        samples = [
            sample.with_streams(reference_logprobs=found.logprobs)
            for sample, found in zip(samples, scores, strict=True)
        ]
    if facts.of_pairs:  # the mean is over pairs
        packed = pack_pairs([replace(sample, denominator=0.5) for sample in samples], budget)
    else:
        packed = pack(samples, budget)
    return equally_many(packed, backend.data_parallel_group)


def _scored_at_end(sample: Sample, padding: int) -> Sample:
    """Return the sample with one token more, in whose place the model gives its score: after the last token
    that is not `padding`, where transformers takes it."""
    end = int(np.flatnonzero(sample.token_ids != padding)[-1]) + 1
    tokens = np.append(sample.token_ids[:end], sample.token_ids[end - 1])
    return replace(sample, token_ids=tokens, loss_mask=np.arange(end + 1) == end)


def begin_reinforcement_learning(backend: Backend, settings: LearnerSettings) -> None:
    """Give the policy a fresh optimizer, make it the reference if that is due, and begin the critic. Every
    rank calls this. Optimizer and critic that come from another run go on where no warm-up used them."""
    use_threads(settings.learner.threads, backend.size_bytes)
    if settings.warmup.steps or not settings.model.from_optimizer:
        backend.set_optimizer(settings.learner.optimizer)
        if backend.critic is not None:
            backend.critic.begin()
    if settings.warmup.steps and settings.warmup.loss.facts.to_reference:
        backend.frozen.keep_only(set())  # reinforcement learning has a reference of its own
    hold_frozen_policies(backend, settings, settings.learner, stage="rl", step=0)


def finish_warm_up(
    backend: Backend, settings: LearnerSettings, demonstrations: Demonstrations | None, progress: Progress,
    stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Take the steps that are left and begin reinforcement learning, for a process that leads no ranks. When
    `stopped` comes before the last step, the stage stays "warmup"."""
    steps = range(progress.warmup_step, settings.warmup.steps)
    for step in tracked(steps, "warming up on demonstrations"):
        if stopped():
            return
        warm_up_step(backend, settings, demonstrations, step)
        progress.warmup_step += 1
    begin_reinforcement_learning(backend, settings)
    progress.end_warm_up(has_trained=settings.warmup.steps > 0)
