"""The critic's part of a step: it learns what the values of the batch should have been."""

from collections.abc import Sequence
from statistics import fmean

from learner.backends.contract.backend import Backend, CriticUpdate
from learner.config.learner import LearnerConfig
from learner.data.data_parallel import equally_many
from learner.data.packing import Sample, pack, without_experts
from learner.logprobs.values import critic_of


def train_critic(
    backend: Backend, updates: Sequence[Sequence[Sample]], learner: LearnerConfig
) -> dict[str, float]:
    """Update the critic on the samples of each of the step's updates, `critic.epochs` times over all of them.

    Every rank calls this, with its own samples, which have `values` and `value_targets`. Returns the figures
    of the step: `value_loss` and `clipped_fraction` are means over its updates, `explained_variance`,
    `value_mean` and `target_mean` are of the first epoch, `grad_norm` is the largest, `lr` the last, and
    `skipped_updates` a count.
    """
    critic, ranks = critic_of(backend), backend.data_parallel_group
    budget, share = learner.batch.token_budget, learner.batch.share_prefixes
    batches = [
        equally_many(pack(without_experts(samples), budget, share_prefixes=share), ranks)
        for samples in updates
    ]
    epochs = [
        [critic.train_step(batch, learner.critic) for batch in batches] for _ in range(learner.critic.epochs)
    ]
    return _figures([update for epoch in epochs for update in epoch], epochs[0], learner.critic.loss_coef)


def _figures(
    updates: Sequence[CriticUpdate], first_epoch: Sequence[CriticUpdate], loss_coef: float
) -> dict[str, float]:
    trained = [update for update in updates if update.values]
    if not trained:
        return {"skipped_updates": float(len(updates))}
    before = [update for update in first_epoch if update.values]
    weights = [float(update.values) for update in trained]
    known = [update.explained_variance for update in before if update.explained_variance is not None]
    explained = {"explained_variance": fmean(known)} if known else {}
    return {
        "value_loss": fmean((update.loss / loss_coef for update in trained), weights),
        "clipped_fraction": sum(update.clipped for update in trained) / sum(weights),
        **explained,
        "value_mean": fmean((update.value_mean for update in before), [float(u.values) for u in before]),
        "target_mean": fmean((update.target_mean for update in before), [float(u.values) for u in before]),
        "grad_norm": max(update.grad_norm for update in trained),
        "lr": updates[-1].lr,
        "skipped_updates": float(sum(update.skipped for update in updates)),
    }
