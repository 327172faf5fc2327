"""Tells how the losses of tokens become one number: each token's weight, and what the sum is divided by.

A loss is sum(weight * token loss) / sum(denominator), both sums over all micro-batches and ranks of an
update. Weights and denominators are known before the first forward pass and count every trained token, so
that neither packing, nor the number of ranks, nor a correction that rejects tokens changes what a kept token
weighs.

An aggregation takes the number of trained tokens of each trajectory, int [S], and the number of its prompt,
int [S], and returns the weight of each trajectory's tokens [S] and the share of each trajectory in the
denominator [S]."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bus.errors import ConfigError
from learner.algorithms.plugin import chosen_function
from learner.config.algorithm import Aggregation
from learner.data.packing import Sample

Aggregated = tuple[np.ndarray, np.ndarray]


def token_mean(lengths: np.ndarray, prompts: np.ndarray) -> Aggregated:
    """Return the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8)."""
    return np.ones(len(lengths)), lengths.astype(np.float64)


def sequence_mean(lengths: np.ndarray, prompts: np.ndarray) -> Aggregated:
    """Return the mean over trajectories of the mean over their tokens (GRPO, arXiv:2402.03300, eq. 3)."""
    return 1.0 / np.maximum(lengths, 1), (lengths > 0).astype(np.float64)


def prompt_mean(lengths: np.ndarray, prompts: np.ndarray) -> Aggregated:
    """Return the mean over prompts of the mean over all tokens of a prompt's trajectories (ScaleRL,
    arXiv:2510.13786), or over episodes by their numbers."""
    _, of = np.unique(prompts, return_inverse=True)
    tokens = np.bincount(of, weights=lengths)[of]
    weights = 1.0 / np.maximum(tokens, 1)
    return weights, weights * lengths


def constant(lengths: np.ndarray, prompts: np.ndarray, *, tokens: int) -> Aggregated:
    """Return the mean over trajectories of their tokens' sum divided by a constant (Dr. GRPO,
    arXiv:2503.20783)."""
    return np.ones(len(lengths)), np.full(len(lengths), float(tokens))


def aggregated(samples: Sequence[Sample], config: Aggregation) -> list[Sample]:
    """Return the samples of one update with their tokens' weights and their shares of the denominator.

    All trajectories of a prompt must be among them. Raises `ConfigError` where a user's aggregation returns
    anything but finite weights and denominators of each trajectory."""
    if config.weighs_alike:
        return list(samples)
    lengths = np.array([sample.trained_tokens for sample in samples], np.int64)
    prompts = np.array([sample.group for sample in samples], np.int64)
    if config.by_episode:
        _, prompts = np.unique([sample.episode for sample in samples], return_inverse=True)
    weights, denominators = (np.asarray(x, np.float64) for x in aggregation(config)(lengths, prompts))
    for name, values in (("weights", weights), ("denominators", denominators)):
        if values.shape != lengths.shape or not np.isfinite(values).all():
            count = len(samples)
            raise ConfigError(f"aggregation {config.type!r}: {name} of {count} trajectories are {values}")
    return [
        replace(sample.with_streams(loss_weights=float(weight)), denominator=float(share))
        for sample, weight, share in zip(samples, weights, denominators, strict=True)
    ]


def aggregation(config: Aggregation) -> Callable[[np.ndarray, np.ndarray], Aggregated]:
    return chosen_function("aggregation", config)
