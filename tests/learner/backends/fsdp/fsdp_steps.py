"""Steps of both backends."""

import torch.distributed as dist

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-4)
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}


def trained(backend: str, family: str, steps: int = 4, **settings: object):
    """Return loss, gradient norm and entropy of each step, the weights, and the trainer."""
    model = tiny_model(family, tied=family == "qwen3")
    trainer = BACKENDS[backend](model.config, hf_state(model), OPTIMIZER, **settings)
    results = []
    for step in range(steps):
        # the last rank has fewer micro-batches than the others
        samples = random_samples(LENGTHS, seed=step)[: 8 - 3 * dist.get_rank()]
        result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
        results.append((result.loss, result.grad_norm, result.diagnostics["entropy_nats"]))
    return results, trainer.export(), trainer
