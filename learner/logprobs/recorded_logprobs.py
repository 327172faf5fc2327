"""The pass that says what the weights before a step make of a few of its trajectories, for people to see."""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from bus.trajectory import Groups
from learner.backends.contract.backend import Backend
from learner.config.learner import LearnerConfig
from learner.data.batches import recorded_samples
from learner.data.packing import Sample
from learner.logprobs.logprobs import score


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
