"""Three steps on each rank's share of the samples; saves or resumes a checkpoint. Run by torchrun."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from learner.backends.factory import close_world, init_world
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import (
    load_checkpoint,
    save_checkpoint,
)
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.tiny import TIS, random_samples, tiny_model


def train(mode: str, checkpoints: Path) -> list[list[float]]:
    """Return [loss, grad norm, tokens] of each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny_model()
    trainer = Trainer(model.config, model.state_dict(), OptimizerConfig(lr=1e-3, warmup_steps=4))
    if mode == "resume":
        load_checkpoint(trainer, latest_checkpoint(checkpoints))
    results = []
    for step in range(trainer.counts.steps_done, trainer.counts.steps_done + 3):
        samples = random_samples([5, 17, 2, 32, 9, 20, 20, 3], seed=step)[rank::ranks]
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        results.append([result.loss, result.grad_norm, result.tokens])
    if mode == "save":
        save_checkpoint(trainer, checkpoints, 3, {}, keep=1)
    return results


def main(mode: str, checkpoints: Path) -> None:
    """Print the results as JSON, from rank 0."""
    torch.set_num_threads(1)
    init_world()
    results = train(mode, checkpoints)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(results) + "\n")
    close_world()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
