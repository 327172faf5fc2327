"""Trainers whose state is saved."""

from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import TIS, hf_state, random_samples

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=5, weight_decay=0.1)


def trainer_of(model, **settings):
    return Trainer(model.config, hf_state(model), OPTIMIZER, **settings)


def train(trainer, steps):
    results = []
    for step in steps:
        batches = pack(random_samples([5, 17, 2, 32, 9], seed=step), 40)
        results.append(trainer.train_step(batches, TIS, policy_version=3))
    return results
