"""Picks tokens by looking at all of an update at once, before its forward pass.

What is picked depends neither on the micro-batches nor on the number of ranks: the numbers of all tokens are
gathered from the data-parallel ranks, and each rank marks its own. They are those of the policy before the
step; where several updates share a batch, the later ones still go by the policy before the first."""

from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from learner.algorithms.tokens import LARGEST_DISTANCE
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample
from learner.distributed.process_group import device, gathered_columns

Floats = NDArray[np.float64]
Picked = NDArray[np.bool_]
Pick = Callable[[Floats, Floats, Floats, Floats], Picked]
"""Takes log ratios of the policy before the step over the one that sampled (nats), the former's log-probs,
advantages and a random number of each token, [N] each; returns which tokens are picked [N]."""


def second_moment(
    log_ratio: Floats, logprobs: Floats, advantages: Floats, lot: Floats, *, largest_moment: float
) -> Picked:
    """Pick the largest log ratios, as few as leave the mean square of the others at or below the bound (M2PO,
    arXiv:2510.01161). Equal ones are picked together."""
    squares = np.square(np.clip(log_ratio, -LARGEST_DISTANCE, LARGEST_DISTANCE))
    ascending = np.sort(squares)
    means = np.cumsum(ascending) / np.arange(1, len(squares) + 1)  # never falls
    kept = int(np.searchsorted(means, largest_moment, side="right"))
    return squares >= (ascending[kept] if kept < len(squares) else np.inf)


def clip_cov(
    log_ratio: Floats, logprobs: Floats, advantages: Floats, lot: Floats, *,
    picked_fraction: float, lowest_covariance: float, highest_covariance: float,
) -> Picked:  # fmt: skip
    """Pick tokens at random among those whose covariance lies in the range (Clip-Cov, arXiv:2505.22617)."""
    covariance = _covariances(logprobs, advantages)
    eligible = (covariance > lowest_covariance) & (covariance < highest_covariance)
    return _first(np.where(eligible, lot, np.inf), _count(picked_fraction, lot)) & eligible


def kl_cov(
    log_ratio: Floats, logprobs: Floats, advantages: Floats, lot: Floats, *, picked_fraction: float
) -> Picked:
    """Pick the tokens of largest covariance (KL-Cov, arXiv:2505.22617)."""
    return _first(-_covariances(logprobs, advantages), _count(picked_fraction, lot), lot)


def _covariances(logprobs: Floats, advantages: Floats) -> Floats:
    bounded = np.clip(logprobs, -LARGEST_DISTANCE, 0)
    covariances: Floats = (bounded - bounded.mean()) * (advantages - advantages.mean())
    return covariances


def _count(fraction: float, tokens: Floats) -> int:
    return max(1, int(fraction * len(tokens)))


def _first(keys: Floats, count: int, then: Floats | None = None) -> Picked:
    """Return which are the `count` smallest keys; of equal keys those with the smallest `then`."""
    picked = np.zeros(len(keys), np.bool_)
    picked[np.lexsort((keys if then is None else then, keys))[:count]] = True
    return picked


def selections(learner: LearnerConfig) -> dict[str, Pick]:
    """Return what the objective wants to be picked, by the stream that says so."""
    rejections = ((one, one.picks) for one in learner.used_rejections)
    return {
        picks.stream: partial(resolve_name(picks.computed_by), **choice.model_dump(include={*picks.settings}))
        for choice, picks in (*rejections, (learner.loss, learner.loss.facts.picks))
        if picks is not None
    }


def with_selections(
    samples: Sequence[Sample], learner: LearnerConfig, group: dist.ProcessGroup
) -> list[Sample]:
    """Return the samples of one update with the streams that the objective picks tokens by.

    They have the stream `proximal_logprobs` where there is anything to pick. Every rank of `group` calls this
    with its own samples."""
    wanted = selections(learner)
    if not wanted:
        return list(samples)
    own = np.concatenate([np.zeros((4, 0)), *map(_known, samples)], axis=1)
    parts = [part.cpu().numpy() for part in gathered_columns(torch.from_numpy(own).to(device()), group)]
    behaviour, proximal, advantages, lot = np.concatenate(parts, axis=1)
    begin = sum(part.shape[1] for part in parts[: group.rank()])
    ends = np.cumsum([begin, *(sample.trained_tokens for sample in samples)])
    streams: list[dict[str, NDArray[np.float32]]] = [{} for _ in samples]
    for name, pick in wanted.items():
        picked = pick(proximal - behaviour, proximal, advantages, lot) if len(lot) else np.zeros(0, np.bool_)
        for i, sample in enumerate(samples):
            marks = np.zeros(len(sample.token_ids), np.float32)
            marks[_trained(sample)] = picked[ends[i] : ends[i + 1]]
            streams[i][name] = marks
    return [sample.with_streams(**marks) for sample, marks in zip(samples, streams, strict=True)]


def _trained(sample: Sample) -> NDArray[np.intp]:
    return np.flatnonzero(sample.loss_mask[1:]) + 1


def _known(sample: Sample) -> Floats:
    """Return behaviour log-probs, those before the step, advantages and random numbers, [4, n].

    They are those of the trained tokens; the random ones depend on nothing but the sample's tokens."""
    names, trained = ("behaviour_logprobs", "proximal_logprobs", "advantages"), _trained(sample)
    length = len(sample.token_ids)
    known = [np.broadcast_to(np.asarray(sample.streams[name], np.float64), length)[trained] for name in names]
    lot = np.random.default_rng(xxhash.xxh3_64_intdigest(sample.token_ids.tobytes())).random(length)
    return np.stack([*known, lot[trained]])
