"""Passes that only compute log-probs: without gradient or stored activations, with their own token budget."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from bus.errors import ConfigError, TrainingError
from bus.trajectory import Groups
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import Backend, Critic
from learner.config.learner import LearnerConfig
from learner.data.batches import recorded_samples
from learner.data.packing import MicroBatch, Sample, numbered_packs, without_experts
from learner.data.top_tokens import NO_TOKEN, TopTokens
from learner.logprobs.served_teachers import NO_ANSWERS, TeacherAnswers

R = TypeVar("R")
Packs = Sequence[tuple[list[int], MicroBatch]]
"""Micro-batches, each with the numbers of its samples."""


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
    found = score(backend, chosen, tokens_per_micro_batch=learner.batch.logprob_token_budget)
    return {
        sample.name: scores.logprobs[1:][sample.loss_mask[1:]]
        for sample, scores in zip(chosen, found, strict=True)
    }


def _chosen(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Return so many samples, whatever their length or reward: the same on each rank, others in each step."""
    return sorted(samples, key=lambda sample: xxhash.xxh3_64_intdigest(sample.name.encode()))[:count]


def _with_top_tokens(
    backend: Backend, samples: Sequence[Sample], learner: LearnerConfig,
    answers: Mapping[str, Sequence[TopTokens]],
) -> list[Sample]:  # fmt: skip
    """Add the likeliest tokens of the teacher that each sample has, and the weight of their divergence."""
    found = list(samples)
    for tag, teacher in learner.used_teachers.items():
        if teacher.kl != "top_k":
            continue
        taught = [i for i, sample in enumerate(samples) if teacher.teaches(sample.source)]
        tops: Sequence[TopTokens]
        if teacher.url is not None:
            tops = answers[tag]
        else:
            packs = _packs(without_experts([samples[i] for i in taught]), learner)
            count = teacher.top_k or 0
            with backend.frozen.in_place(tag):
                values_of = backend.top_tokens([batch for _, batch in packs], count)
            tops = _by_sample(packs, values_of, partial(_top_tokens, count=count))
        for i, top in zip(taught, tops, strict=True):
            with_coef = samples[i].with_streams(**{f"{teacher.direction}_kl_coefs": teacher.coef})
            found[i] = replace(with_coef, taught=top)
    return found


def _packs(samples: Sequence[Sample], learner: LearnerConfig) -> Packs:
    budget, share_prefixes = learner.batch.logprob_token_budget, learner.batch.share_prefixes
    return numbered_packs(samples, budget, share_prefixes=share_prefixes)


def _by_sample(packs: Packs, values_of: Sequence[Tensor], read: Callable[[Tensor], R]) -> list[R]:
    """Return what `read` makes of the values [..., L] of each sample, in the order of the samples."""
    found: dict[int, R] = {}
    for (members, batch), values in zip(packs, values_of, strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=-1), strict=True):
            found[i] = read(of_sample)
    return [found[i] for i in range(len(found))]


def _top_tokens(values: Tensor, count: int) -> TopTokens:
    """Shift by one: position t holds the prediction of token t + 1, and NaN where that is not trained."""
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
    scored = list(samples)
    for tag in Objective.of(learner).policies:
        if tag == "proximal" and learner.router_replay == "learner":
            continue  # `with_own_experts` knows them already
        for i, scores in enumerate(_score(backend, samples, learner, None if tag == "proximal" else tag)):
            scored[i] = scored[i].with_streams(**{f"{tag}_logprobs": scores.logprobs})
    scored = _with_teachers(backend, scored, learner, answers.logprobs)
    return _with_top_tokens(backend, scored, learner, answers.top_tokens)


def _with_teachers(
    backend: Backend, samples: Sequence[Sample], learner: LearnerConfig,
    answers: Mapping[str, Sequence[NDArray[np.float32]]],
) -> list[Sample]:  # fmt: skip
    """Add what the loss wants of the teachers: how much each sample is drawn to them, and where they are.

    The sum over teachers of c log(policy / teacher) is C log(policy / m), with C the sum of the weights c and
    log m the mean of the teachers' log-probs by these weights: so any number of teachers is one penalty."""
    coefs = [0.0] * len(samples)
    totals: list[NDArray[np.float64] | float] = [0.0] * len(samples)
    for tag, teacher in learner.used_teachers.items():
        if teacher.kl != "sampled":
            continue
        taught = [i for i, sample in enumerate(samples) if teacher.teaches(sample.source)]
        found: Sequence[NDArray[np.float32]]
        if teacher.url is not None:
            found = answers[tag]
        else:
            passed = _score(backend, [samples[i] for i in taught], learner, tag)
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


def _score(
    backend: Backend, samples: Sequence[Sample], learner: LearnerConfig, policy: str | None
) -> list[TokenScores]:
    budget, share_prefixes = learner.batch.logprob_token_budget, learner.batch.share_prefixes
    return score(
        backend, samples, policy=policy, tokens_per_micro_batch=budget, share_prefixes=share_prefixes
    )


def score(
    backend: Backend, samples: Sequence[Sample], *,
    policy: str | None = None, tokens_per_micro_batch: int, share_prefixes: bool = False,
) -> list[TokenScores]:  # fmt: skip
    """Compute log-probs and entropy of the trained tokens. Every rank calls this. `policy` is the tag of a
    frozen policy; `None` is the current one. The weights are bit for bit the same afterwards. `samples` are
    equal on the ranks that share a model; one that is longer than `tokens_per_micro_batch` is alone in its
    own."""
    if policy is not None:
        samples = without_experts(samples)
    packs = numbered_packs(samples, tokens_per_micro_batch, share_prefixes=share_prefixes)
    with nullcontext() if policy is None else backend.frozen.in_place(policy):
        values_of = backend.logprobs([batch for _, batch in packs])
    return _by_sample(packs, values_of, _scores)


def with_own_experts(backend: Backend, samples: Sequence[Sample], learner: LearnerConfig) -> list[Sample]:
    """Have all passes of the step send each token where a first one does. Every rank calls this. Its
    log-probs are those of the proximal policy, and are added where the objective wants them."""
    is_wanted = "proximal" in Objective.of(learner).policies
    packs = _packs(samples, learner)
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
    packs = _packs(without_experts(samples), learner)
    values_of = critic_of(backend).values([batch for _, batch in packs])
    shifted = _by_sample(packs, values_of, lambda v: torch.cat((torch.full((1,), torch.nan), v[:-1])).numpy())
    for sample, values in zip(samples, shifted, strict=True):
        if not np.isfinite(values[1:][sample.loss_mask[1:]]).all():
            raise TrainingError(
                f"the critic gives {sample.name} a value that is not finite: go on from an older checkpoint "
                "with a lower learner.critic.optimizer.lr"
            )
    return [sample.with_streams(values=values) for sample, values in zip(samples, shifted, strict=True)]
