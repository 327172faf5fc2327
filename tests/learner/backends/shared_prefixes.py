"""Samples behind one prompt."""

from dataclasses import replace

import numpy as np
import torch

from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from tests.learner.tiny import hf_state, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""


def trainer_of(parallel: ParallelConfig = UNDIVIDED, **model: object) -> Trainer:
    policy = tiny_model(**model)
    return Trainer(policy.config, hf_state(policy), OPTIMIZER, dtype=torch.float32, parallel=parallel)


def one_prompt(siblings_of_two):
    """The two trajectories of a group behind 40 tokens of one prompt."""
    return [behind(one, np.arange(40, dtype=np.int32) % 7) for one in siblings_of_two]


def behind(trajectory, prompt: np.ndarray):
    before = len(prompt)

    def joined(values: np.ndarray, fill: float) -> np.ndarray:
        return np.append(np.full(before, fill, values.dtype), values)

    return replace(
        trajectory,
        token_ids=np.append(prompt, trajectory.token_ids),
        loss_mask=joined(trajectory.loss_mask, fill=0),
        behaviour_logprobs=joined(trajectory.behaviour_logprobs, fill=0),
        policy_versions=joined(trajectory.policy_versions, fill=-1),
        turns=tuple(
            turn._replace(start=turn.start + before, stop=turn.stop + before) for turn in trajectory.turns
        ),
    )
