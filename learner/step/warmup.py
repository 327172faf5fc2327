"""The supervised stage before reinforcement learning, the same for the learner and for who repeats it."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from bus.process.work_progress import tracked
from learner.backends.contract.backend import Backend, StepResult
from learner.config.batch import BatchConfig
from learner.config.loss import SFTLoss
from learner.config.process_settings import LearnerSettings
from learner.data.data_parallel import equally_many
from learner.data.demonstrations import Demonstrations
from learner.distributed.process_group import device, use_threads
from learner.logprobs.frozen_policies import hold_frozen_policies
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
    batches = demonstrations.step(
        step, settings.warmup, settings.learner.batch, share=ranks.rank(), shares=ranks.size()
    )
    return backend.train_step(equally_many(batches, ranks), SFTLoss(), policy_version=0)


def heldout_loss(backend: Backend, batch: BatchConfig, demonstrations: Demonstrations) -> float:
    """Return the mean negative log-prob of the trained tokens of held-out demonstrations, in nats. Every rank
    calls this; nothing of the backend changes."""
    ranks = backend.data_parallel_group
    shares = demonstrations.all(batch, share=ranks.rank(), shares=ranks.size())
    batches = equally_many(shares, ranks)
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    for packed, (logprobs, _) in zip(batches, backend.logprobs(batches), strict=True):
        trained = logprobs[packed.loss_mask].double()
        sums += torch.stack([-trained.sum(), torch.tensor(float(len(trained)))]).to(sums)
    dist.all_reduce(sums, group=ranks)
    return float(sums[0] / sums[1])


def begin_reinforcement_learning(backend: Backend, settings: LearnerSettings) -> None:
    """Give the policy a fresh optimizer, make it the reference if that is due, and begin the critic. Every
    rank calls this. Optimizer and critic that come from another run go on where no warm-up used them."""
    use_threads(settings.learner.threads, backend.size_bytes)
    if settings.warmup.steps or not settings.model.from_optimizer:
        backend.set_optimizer(settings.learner.optimizer)
        if backend.critic is not None:
            backend.critic.begin()
    hold_frozen_policies(backend, settings, settings.learner, stage="rl", step=0)


def finish_warm_up(
    backend: Backend, settings: LearnerSettings, demonstrations: Demonstrations | None, progress: Progress,
    stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Take the steps that are left and begin reinforcement learning, for a process that leads no ranks.

    When `stopped` comes before the last step, the stage stays "warmup".
    """
    steps = range(progress.warmup_step, settings.warmup.steps)
    for step in tracked(steps, "warming up on demonstrations"):
        if stopped():
            return
        warm_up_step(backend, settings, demonstrations, step)
        progress.warmup_step += 1
    begin_reinforcement_learning(backend, settings)
    progress.end_warm_up(has_trained=settings.warmup.steps > 0)
