"""Steps of a tiny policy with teachers of the same weights, behind a server or held here."""

from dataclasses import replace
from functools import cache

import torch
from transformers import PreTrainedModel

from bus.trajectory import SOURCE
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.logprobs.served_teachers import teachers_asked
from learner.step.rl_step import train_on
from tests.factories import make_trajectory
from tests.learner.division import divide_world
from tests.learner.tiny import VOCAB, hf_state, tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)


@cache
def teacher() -> PreTrainedModel:
    """The model that every teacher is."""
    return tiny_model(seed=3)


def groups_of(count: int = 2) -> list[list]:
    """Groups of three siblings of several lengths; their sources are "even" and "odd"."""
    made = [
        [
            make_trajectory(n, sample, group_size=3, tokens=6 + 3 * sample + n, reward=float(sample == n % 3))
            for sample in range(3)
        ]
        for n in range(count)
    ]
    return [
        [replace(t, token_ids=t.token_ids % VOCAB, metadata={SOURCE: ("even", "odd")[n % 2]}) for t in group]
        for n, group in enumerate(made)
    ]


def stepped(learner: LearnerConfig) -> tuple[list[tuple[float, float, float]], torch.Tensor, set[str]]:
    """Loss, gradient norm and distance to the teacher of two steps; the weights; and the policies held."""
    policy = tiny_model(seed=0)
    divide_world(ParallelConfig())
    trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER, parallel=ParallelConfig())
    for tag, config in learner.used_teachers.items():
        if config.path is not None:
            trainer.frozen.load(tag, policy.config, hf_state(teacher()), config.path)
    results, held = [], {tag for tag in learner.used_teachers if tag in trainer.frozen}
    for step in (1, 2):
        groups = groups_of()
        answers = teachers_asked(groups, learner, vocab_size=VOCAB)
        weights = [1.0] * len(groups)
        _, result = train_on(
            trainer, groups, weights, learner, step=step, policy_version=step, answers=answers
        )
        distance = result.diagnostics.get("teacher_k1_nats", result.diagnostics.get("teacher_kl_nats", 0.0))
        results.append((result.loss, result.grad_norm, distance))
    return results, torch.cat([weight.flatten() for weight in trainer.export().values()]), held
