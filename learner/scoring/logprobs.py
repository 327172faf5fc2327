"""Passes that only compute log-probs: without gradient or stored activations, with their own token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.algorithms.objective import Objective
from learner.backends.base import Backend
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample, first_fit, micro_batch_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Result of a pass for a sample of L tokens; NaN at tokens that are not trained."""

    logprobs: np.ndarray
    """float32 [L], nats."""
    entropy: np.ndarray
    """float32 [L], nats, of the distribution that the token was drawn from."""


def with_logprobs(backend: Backend, samples: Sequence[Sample], learner: LearnerConfig) -> list[Sample]:
    """Add log-probs under the other policies that the objective wants, a pass each. Every rank calls this.

    The current policy is the proximal one of the updates that follow (arXiv:2110.00641).
    """
    budget = learner.batch.logprob_tokens_per_micro_batch or learner.batch.tokens_per_micro_batch
    scored = list(samples)
    for tag in Objective.of(learner).policies:
        found = score(
            backend,
            samples,
            policy=None if tag == "proximal" else tag,
            tokens_per_micro_batch=budget,
        )
        for i, scores in enumerate(found):
            scored[i] = scored[i].with_streams(**{f"{tag}_logprobs": scores.logprobs})
    return scored


def score(
    backend: Backend,
    samples: Sequence[Sample],
    *,
    policy: str | None = None,
    tokens_per_micro_batch: int,
) -> list[Scores]:
    """Compute log-probs and entropy of the trained tokens. Every rank calls this.

    Args:
        backend: its weights are bit for bit the same afterwards.
        samples: the samples of this data-parallel rank, equal on the ranks that share a model with it.
        policy: tag of a frozen policy; `None` is the current one.
        tokens_per_micro_batch: budget of a pack, by first fit; a longer sample is alone in its own.
    """
    if policy is not None:
        with backend.frozen.in_place(policy):
            return score(backend, samples, tokens_per_micro_batch=tokens_per_micro_batch)
    bins = first_fit([len(sample.token_ids) for sample in samples], tokens_per_micro_batch)
    batches = [micro_batch_of([samples[i] for i in members]) for members in bins]
    found: dict[int, Scores] = {}
    for members, batch, values in zip(bins, batches, backend.logprobs(batches), strict=True):
        for i, of_sample in zip(members, torch.split(values, list(batch.lengths), dim=1), strict=True):
            found[i] = _scores(of_sample)
    return [found[i] for i in range(len(samples))]


def _scores(values: Tensor) -> Scores:
    """Shift by one: position t holds the prediction of token t + 1."""
    first = torch.full((2, 1), torch.nan)
    logprobs, entropy = torch.cat((first, values[:, :-1]), dim=1).numpy()
    return Scores(logprobs=logprobs, entropy=entropy)
