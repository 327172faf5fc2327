"""The pass that asks the critic, before the step, what the states of each sample are worth."""

from collections.abc import Sequence

import numpy as np
import torch

from bus.errors import ConfigError, TrainingError
from learner.backends.contract.backend import Backend, Critic
from learner.config.learner import LearnerConfig
from learner.data.packing import Sample, numbered_packs, without_experts


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
            _refuse_not_finite(samples[i], shifted)
            found[i] = samples[i].with_streams(values=shifted)
    return [found[i] for i in range(len(samples))]


def _refuse_not_finite(sample: Sample, values: np.ndarray) -> None:
    if not np.isfinite(values[1:][sample.loss_mask[1:]]).all():
        raise TrainingError(
            f"the critic gives {sample.name} a value that is not finite: go on from an older checkpoint with "
            "a lower learner.critic.optimizer.lr"
        )
