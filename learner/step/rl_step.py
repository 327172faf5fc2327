"""One step of reinforcement learning on the groups it was given: the same for whoever trains on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from statistics import fmean

from bus.requests import GroupRef
from bus.trajectory import Groups
from learner.algorithms.advantages.step_advantages import advantages_of_step, with_value_targets
from learner.algorithms.aggregation import aggregated
from learner.algorithms.hooks import figures_after_step, optimizer_of_step, with_processed_rewards
from learner.algorithms.losses.objective import Objective
from learner.algorithms.selection import with_selections
from learner.backends.contract.backend import Backend, CriticUpdate, StepResult
from learner.backends.update.step_times import StepTimes
from learner.config.learner import LearnerConfig
from learner.data.batches import NO_BASELINES, StepBatch, make_step_batch, recorded_samples
from learner.data.data_parallel import equally_many, of_all_ranks, sums_over_ranks
from learner.data.packing import (
    MicroBatch,
    Sample,
    counting_left_out,
    pack,
    refuse_oversized,
    without_experts,
)
from learner.logprobs.frozen_policies import refresh_reference
from learner.logprobs.logprobs import critic_of, with_logprobs, with_own_experts, with_values
from learner.logprobs.served_teachers import NO_ANSWERS, TeacherAnswers
from learner.progress.lineage import TrainedStep


def train_critic(
    backend: Backend, updates: Sequence[Sequence[Sample]], learner: LearnerConfig
) -> dict[str, float]:
    """Update the critic on the samples of each of the step's updates, `critic.epochs` times over all of them.

    Every rank calls this, with its own samples, which have `values` and `value_targets`. Returns the figures
    of the step: `value_loss` and `clipped_fraction` are means over its updates, `explained_variance`,
    `value_mean` and `target_mean` are of the first epoch, `grad_norm` is the largest, `lr` the last, and
    `skipped_updates` a count."""
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


def train_on(
    backend: Backend, groups: Groups, weights: Sequence[float], learner: LearnerConfig, *,
    step: int, policy_version: int, baselines: Mapping[str, float] = NO_BASELINES,
    answers: TeacherAnswers = NO_ANSWERS,
) -> tuple[StepBatch, StepResult]:  # fmt: skip
    """Update the weights, which are of `policy_version`, on these groups with their importance weights.

    Where there is a critic it is trained as well, on what its values should have been; in the first
    `critic.warmup_steps` steps of a run it alone is.

    `step` counts from 1. `baselines` are those in the batch of the step before, `answers` those of the
    teachers behind servers, equal on the ranks that share a model. Of several ranks each gives
    its own groups; the batch's counts and the result are those of all. Raises `ConfigError` for a trajectory
    over the token budget, if such are to be refused, for rewards that the advantage cannot take, and for
    hooks of the user's that misfit."""
    ranks = backend.data_parallel_group
    samples = recorded_samples(groups, with_experts=learner.router_replay == "engine")
    if learner.batch.oversized == "refuse":  # all samples, before a pass or an update is in vain
        refuse_oversized(samples, learner.batch.token_budget)
    if learner.before_step.function is not None:
        backend.optimizer_config = optimizer_of_step(step, groups, learner, backend.lent_weights)
    times = StepTimes()
    with times.part("logprobs_s"):
        if learner.router_replay == "learner":
            samples = with_own_experts(backend, samples, learner)
        samples = with_logprobs(backend, samples, learner, answers)
        if learner.has_critic:
            samples = with_values(backend, samples, learner)
    sums = sums_over_ranks(ranks)
    rewarded = with_processed_rewards(groups, learner, sums)
    advantages, kept = advantages_of_step(rewarded, samples, learner, sums=sums, baselines=baselines)
    batch = of_all_ranks(
        make_step_batch(
            groups,
            with_value_targets(rewarded, samples, learner),
            advantages,
            policy_version=policy_version,
            weights=weights,
            baselines=kept,
        ),
        ranks,
    )
    count = learner.batch.updates
    updates = [[one for one in batch.samples if one.update_slot % count == n] for n in range(count)]
    critic: Mapping[str, float] = {}
    if learner.has_critic:
        with times.part("critic_s"):
            critic = train_critic(backend, updates, learner)
    if learner.only_critic_trains(step):
        result = _none(batch)
    else:
        with times.part("update_s"):
            result = _policy_updates(backend, updates, learner, policy_version)
    figures = figures_after_step(step, learner, backend.lent_weights)
    refresh_reference(backend, learner, step)
    return batch, replace(
        result, critic=critic, diagnostics={**result.diagnostics, **figures},
        seconds={**result.seconds, **times.seconds()},
    )  # fmt: skip


def _policy_updates(
    backend: Backend, updates: Sequence[Sequence[Sample]], learner: LearnerConfig, policy_version: int
) -> StepResult:
    ranks = backend.data_parallel_group
    return _together([
        backend.train_step(
            equally_many(_packed(backend, own, learner), ranks),
            Objective.of(learner),
            policy_version=policy_version,
        )
        for own in updates
    ])  # fmt: skip


def _none(batch: StepBatch) -> StepResult:
    return StepResult(
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        tokens=batch.response_tokens,
        computed_tokens=0,
        denominator=0.0,
        skipped=False,
        diagnostics={},
    )


def _packed(backend: Backend, samples: Sequence[Sample], learner: LearnerConfig) -> list[MicroBatch]:
    """Return the micro-batches of an update on these samples, weighed and with what is picked of them all.
    Samples that no gradient comes from are left out of them, and counted."""
    picked = with_selections(samples, learner, backend.data_parallel_group)
    weighed = aggregated(picked, learner.used_aggregation)
    batch, skips = learner.batch, learner.skips_zero_advantages
    computed: list[Sample] = []
    left_out: list[Sample] = []
    for sample in weighed:
        (left_out if skips and sample.has_zero_advantages else computed).append(sample)
    packs = pack(computed, batch.token_budget, share_prefixes=batch.share_prefixes)
    return counting_left_out(packs, left_out)


OF_EQUAL_WEIGHTS = ("mismatch_nats", "mismatch_older_kv_nats", "bit_equal_fraction")
"""Figures that compare tokens with the very weights that sampled them, which only the first update has: the
others have drifted from them by the updates before."""


def _together(updates: Sequence[StepResult]) -> StepResult:
    """Join several updates in one result.

    It has the loss over the denominators of all, means by the tokens that they are of, the largest of what is
    a bound, the largest gradient norm or one that is not finite, and the last learning rate. The mismatch is
    that of the first update."""
    if len(updates) == 1:
        return updates[0]

    def mean(values: Sequence[tuple[float, float]]) -> float:
        return sum(value * count for value, count in values) / (sum(count for _, count in values) or 1.0)

    known = [updates[0].diagnostics] + [
        {name: value for name, value in update.diagnostics.items() if name not in OF_EQUAL_WEIGHTS}
        for update in updates[1:]
    ]
    names = dict.fromkeys(name for figures in known for name in figures)
    counts = [update.tokens - update.left_out_tokens for update in updates]
    return StepResult(
        loss=mean([(update.loss, update.denominator) for update in updates]),
        grad_norm=max(
            (update.grad_norm for update in updates), key=lambda norm: norm if isfinite(norm) else inf
        ),
        lr=updates[-1].lr,
        tokens=sum(update.tokens for update in updates),
        computed_tokens=sum(update.computed_tokens for update in updates),
        left_out_tokens=sum(update.left_out_tokens for update in updates),
        denominator=sum(update.denominator for update in updates),
        skipped=any(update.skipped for update in updates),
        diagnostics={
            name: max(values)[0] if name.endswith("_max") else mean(values)
            for name in names
            for values in [[(f[name], n) for f, n in zip(known, counts, strict=True) if name in f]]
        },
        seconds={name: sum(one.seconds[name] for one in updates) for name in updates[0].seconds},
        ratios={name: ratios for update in updates for name, ratios in update.ratios.items()},
    )


def lineage_line(
    step: int, policy_version: int, incarnation: str, groups: Sequence[GroupRef], batch: StepBatch,
    result: StepResult,
) -> TrainedStep:  # fmt: skip
    """Return what the lineage keeps of a step that made `policy_version`; `groups` are those of all ranks."""
    return TrainedStep(
        step=step,
        policy_version=policy_version,
        incarnation=incarnation,
        leases=tuple(group.lease_id for group in groups),
        weights=tuple(group.weight for group in groups),
        batch_xxh3=batch.xxh3(),
        loss=result.loss,
        grad_norm=result.grad_norm,
        entropy=result.diagnostics.get("entropy_nats"),
        lr=result.lr,
        skipped=result.skipped,
    )
