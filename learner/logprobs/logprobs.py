"""Passes that only compute log-probs: without gradient or stored activations, with their own token budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from bus.errors import ConfigError, TrainingError
from bus.trajectory import Groups
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend, Critic
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.data.batches import recorded_samples
from learner.data.packing import Sample, numbered_packs, without_experts
from learner.data.top_tokens import NO_TOKEN, TopTokens
from learner.logprobs.served_teachers import NO_ANSWERS, TeacherAnswers


def recorded_logprobs(
    backend: Backend, groups: Groups, learner: LearnerConfig, *, step: int
) -> dict[str, NDArray[np.float32]]:
    """Return log-probs of the trained tokens of a few trajectories, in nats, by trajectory.

    They are under the weights as they are, so it is called before the step trains on `groups`. It returns
    nothing for a step without a record. Every rank calls this; the first data-parallel one chooses, and the
    ranks that share its model return the same."""
    if not learner.recorded_logprobs.is_due(step):
        return {}
    first = backend.data_parallel_group.rank() == 0
    samples = recorded_samples(groups, with_experts=learner.router_replay == "engine") if first else []
    chosen = _chosen(samples, learner.recorded_logprobs.trajectories)
    batch = learner.batch
    budget = batch.logprob_token_budget
    found = score(backend, chosen, tokens_per_micro_batch=budget)
    return {
        sample.name: scores.logprobs[1:][sample.loss_mask[1:]]
        for sample, scores in zip(chosen, found, strict=True)
    }


def _chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return so many samples, whatever their length or reward: the same on each rank, others in each step."""
    return sorted(samples, key=lambda sample: xxhash.xxh3_64_intdigest(sample.name.encode()))[:count]


def with_top_tokens(
    backend: Backend, samples: Sequence[Sample], teachers: Mapping[str, TeacherConfig],
    answers: Mapping[str, Sequence[TopTokens]], *, tokens_per_micro_batch: int, share_prefixes: bool = False,
) -> list[Sample]:  # fmt: skip
    """Add the likeliest tokens of the teacher that each sample has, and the weight of their divergence.

    Every rank calls this. `teachers` have `kl = "top_k"` and sources that do not overlap; `answers` are those
    of the ones behind servers, which need no pass."""
    found = list(samples)
    for tag, teacher in teachers.items():
        taught = [i for i, sample in enumerate(samples) if teacher.teaches(sample.source)]
        if teacher.url is not None:
            tops = answers[tag]
        else:
            tops = score_top_tokens(
                backend,
                [samples[i] for i in taught],
                teacher.top_k or 0,
                policy=tag,
                tokens_per_micro_batch=tokens_per_micro_batch,
                share_prefixes=share_prefixes,
            )
        for i, top in zip(taught, tops, strict=True):
            with_coef = samples[i].with_streams(**{f"{teacher.direction}_kl_coefs": teacher.coef})
            found[i] = replace(with_coef, taught=top)
    return found


def score_top_tokens(
    backend: Backend, samples: Sequence[Sample], count: int, *, policy: str, tokens_per_micro_batch: int,
    share_prefixes: bool = False,
) -> list[TopTokens]:  # fmt: skip
    """Find the `count` likeliest tokens in place of each trained one. Every rank calls this.

    Args:
        backend: its weights are bit for bit the same afterwards.
        samples: the samples of this data-parallel rank, equal on the ranks that share a model with it.
        count: tokens in each place.
        policy: tag of a frozen policy.
        tokens_per_micro_batch: budget of a pack, by first fit; a longer sample is alone in its own.
        share_prefixes: compute once what samples of one prompt begin with."""
    packs = numbered_packs(without_experts(samples), tokens_per_micro_batch, share_prefixes=share_prefixes)
    with backend.frozen.in_place(policy):
        values_of = backend.top_tokens([batch for _, batch in packs], count)
    found: dict[int, TopTokens] = {}
    for (members, batch), values in zip(packs, values_of, strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=1), strict=True):
            found[i] = _top_tokens(of_sample, count)
    return [found[i] for i in range(len(samples))]


def _top_tokens(values: Tensor, count: int) -> TopTokens:
    """Shift by one: position t holds the prediction of token t + 1, and NaN where it is not trained."""
    first = torch.full((len(values), 1), torch.nan)
    by_token = torch.cat((first, values[:, :-1]), dim=1).numpy().T
    ids, logprobs = by_token[:, :count], by_token[:, count:]
    untrained = np.isnan(ids[:, :1])  # a log-prob of NaN at a trained token stays, and stops the step
    return TopTokens(
        np.where(untrained, NO_TOKEN, ids).astype(np.int32),
        np.where(untrained, -np.inf, logprobs).astype(np.float32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Result of a pass for a sample of L tokens; NaN at tokens that are not trained."""

    logprobs: np.ndarray
    """float32 [L], nats."""
    entropy: np.ndarray
    """float32 [L], nats, of the distribution that the token was drawn from."""


def with_logprobs(
    backend: Backend, samples: Sequence[Sample], learner: LearnerConfig, answers: TeacherAnswers = NO_ANSWERS
) -> list[Sample]:
    """Add log-probs under the other policies that the objective wants, a pass each. Every rank calls this.

    `answers` are those of the teachers behind servers, which need no pass.
    The current policy is the proximal one of the updates that follow (arXiv:2110.00641)."""
    budget = learner.batch.logprob_token_budget
    scored = list(samples)
    for tag in Objective.of(learner).policies:
        if tag == "proximal" and learner.router_replay == "learner":
            continue  # `with_own_experts` knows them already
        found = score(
            backend,
            samples,
            policy=None if tag == "proximal" else tag,
            tokens_per_micro_batch=budget,
            share_prefixes=learner.batch.share_prefixes,
        )
        for i, scores in enumerate(found):
            scored[i] = scored[i].with_streams(**{f"{tag}_logprobs": scores.logprobs})
    share, teachers = learner.batch.share_prefixes, learner.used_teachers
    scored = _with_teachers(
        backend,
        scored,
        {tag: teacher for tag, teacher in teachers.items() if teacher.kl == "sampled"},
        answers.logprobs,
        tokens_per_micro_batch=budget,
        share_prefixes=share,
    )
    return with_top_tokens(
        backend,
        scored,
        {tag: teacher for tag, teacher in teachers.items() if teacher.kl == "top_k"},
        answers.top_tokens,
        tokens_per_micro_batch=budget,
        share_prefixes=share,
    )


def _with_teachers(
    backend: Backend, samples: Sequence[Sample], teachers: Mapping[str, TeacherConfig],
    answers: Mapping[str, Sequence[NDArray[np.float32]]], *,
    tokens_per_micro_batch: int, share_prefixes: bool,
) -> list[Sample]:  # fmt: skip
    """Add what the loss wants of the teachers: how much each sample is drawn to them, and where they are.

    The sum over teachers of c log(policy / teacher) is C log(policy / m), with C the sum of the weights c and
    log m the mean of the teachers' log-probs by these weights: so any number of teachers is one penalty."""
    coefs = [0.0] * len(samples)
    totals: list[NDArray[np.float64] | float] = [0.0] * len(samples)
    for tag, teacher in teachers.items():
        taught = [i for i, sample in enumerate(samples) if teacher.teaches(sample.source)]
        if teacher.url is not None:
            found = answers[tag]
        else:
            passed = score(
                backend,
                [samples[i] for i in taught],
                policy=tag,
                tokens_per_micro_batch=tokens_per_micro_batch,
                share_prefixes=share_prefixes,
            )
            found = [scores.logprobs for scores in passed]
        for i, logprobs in zip(taught, found, strict=True):
            coefs[i] += teacher.coef
            totals[i] = totals[i] + teacher.coef * logprobs.astype(np.float64)
    return [
        sample.with_streams(teacher_logprobs=np.asarray(total / coef, np.float32), teacher_coefs=coef)
        if coef
        else sample
        for sample, coef, total in zip(samples, coefs, totals, strict=True)
    ]


def score(
    backend: Backend,
    samples: Sequence[Sample],
    *,
    policy: str | None = None,
    tokens_per_micro_batch: int,
    share_prefixes: bool = False,
) -> list[TokenScores]:
    """Compute log-probs and entropy of the trained tokens. Every rank calls this.

    Args:
        policy: tag of a frozen policy; `None` is the current one."""
    if policy is not None:
        with backend.frozen.in_place(policy):
            return score(
                backend,
                without_experts(samples),
                tokens_per_micro_batch=tokens_per_micro_batch,
                share_prefixes=share_prefixes,
            )
    packs = numbered_packs(samples, tokens_per_micro_batch, share_prefixes=share_prefixes)
    values_of = backend.logprobs([batch for _, batch in packs])
    found: dict[int, TokenScores] = {}
    for (members, batch), values in zip(packs, values_of, strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=1), strict=True):
            found[i] = _scores(of_sample)
    return [found[i] for i in range(len(samples))]


def with_own_experts(backend: Backend, samples: Sequence[Sample], learner: LearnerConfig) -> list[Sample]:
    """Have all passes of the step send each token where a first one does. Every rank calls this. Its
    log-probs are those of the proximal policy, and are added where the objective wants them."""
    is_wanted = "proximal" in Objective.of(learner).policies
    budget = learner.batch.logprob_token_budget
    packs = numbered_packs(samples, budget, share_prefixes=learner.batch.share_prefixes)
    found = list(samples)
    passed = backend.routed_logprobs([batch for _, batch in packs])
    for (members, batch), (values, experts) in zip(packs, passed, strict=True):
        lengths = list(batch.lengths)
        of_samples = zip(torch.split(values, lengths, dim=1), torch.split(experts, lengths), strict=True)
        for i, (own, chosen) in zip(members, of_samples, strict=True):
            found[i] = replace(samples[i], experts=chosen.numpy(), experts_recorded=False)
            if is_wanted:
                found[i] = found[i].with_streams(proximal_logprobs=_scores(own).logprobs)
    return found


def _scores(values: Tensor) -> TokenScores:
    """Shift by one: position t holds the prediction of token t + 1."""
    first = torch.full((2, 1), torch.nan)
    logprobs, entropy = torch.cat((first, values[:, :-1]), dim=1).numpy()
    return TokenScores(logprobs=logprobs, entropy=entropy)


def critic_of(backend: Backend) -> Critic:
    """Return the critic. Raises `ConfigError` when the backend was built without one."""
    if backend.critic is None:
        raise ConfigError(
            "the objective wants a critic, and this run has trained without one: start a new run, or a "
            "shadow from the initial model, with learner.advantage.type=gae"
        )
    return backend.critic


def with_values(backend: Backend, samples: Sequence[Sample], learner: LearnerConfig) -> list[Sample]:
    """Add the stream `values`: entry i is of the state in which token i was sampled. Every rank calls this.

    A value does not depend on the temperature. Raises `TrainingError` for one that is not finite: it would
    make every advantage before it so."""
    critic = critic_of(backend)
    budget = learner.batch.logprob_token_budget
    packs = numbered_packs(without_experts(samples), budget, share_prefixes=learner.batch.share_prefixes)
    values_of = critic.values([batch for _, batch in packs])
    found: dict[int, Sample] = {}
    for (members, batch), values in zip(packs, values_of, strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths)), strict=True):
            shifted = torch.cat((torch.full((1,), torch.nan), of_sample[:-1])).numpy()
            if not np.isfinite(shifted[1:][samples[i].loss_mask[1:]]).all():
                raise TrainingError(
                    f"the critic gives {samples[i].name} a value that is not finite: go on from an older "
                    "checkpoint with a lower learner.critic.optimizer.lr"
                )
            found[i] = samples[i].with_streams(values=shifted)
    return [found[i] for i in range(len(samples))]
