"""Runs, for each kind of optimizer, six steps, and three, a checkpoint and three."""

from pathlib import Path

import torch
import torch.distributed as dist

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import CosineSchedule, OptimizerConfig
from learner.data.packing import pack
from learner.model_directories.lazy_weights import tensor_digest
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

ADAM = OptimizerConfig(lr=1e-3, warmup_steps=2, weight_decay=0.1, schedule=CosineSchedule(decay_steps=6))
KINDS = {
    "float32": (ADAM, torch.float32),
    "float32 main weights": (ADAM, torch.bfloat16),
    "bfloat16 moments": (ADAM.model_copy(update={"state_dtype": "bfloat16"}), torch.float32),
    "on the host": (ADAM.model_copy(update={"offload": 0.6}), torch.float32),
    "main weights on the host": (ADAM.model_copy(update={"offload": 0.6}), torch.bfloat16),
    "both": (ADAM.model_copy(update={"state_dtype": "bfloat16"}), torch.bfloat16),
    "muon": (ADAM.model_copy(update={"matrices": "muon"}), torch.float32),
    "muon, main weights": (ADAM.model_copy(update={"matrices": "muon"}), torch.bfloat16),
    "fsdp, muon": (ADAM.model_copy(update={"matrices": "muon"}), torch.float32),
    "fsdp": (ADAM, torch.float32),
    "fsdp, all in bfloat16": (ADAM.model_copy(update={"state_dtype": "bfloat16"}), torch.bfloat16),
    "fsdp, on the host": (ADAM.model_copy(update={"offload": 1.0}), torch.float32),
}
Steps = list[tuple[float, float, float]]


def trainer_of(kind: str, *, seed: int = 0) -> Trainer | FsdpTrainer:
    """A trainer with weights drawn from `seed`."""
    optimizer, dtype = KINDS[kind]
    model = tiny_model(seed=seed)
    backend = FsdpTrainer if kind.startswith("fsdp") else Trainer
    return backend(model.config, hf_state(model), optimizer, dtype=dtype)


def train(trainer: Trainer | FsdpTrainer, steps: int) -> Steps:
    """Return loss, gradient norm and learning rate of each step; each rank has its share of the samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = []
    for step in range(trainer.counts.steps_done, trainer.counts.steps_done + steps):
        samples = random_samples([5, 17, 2, 32, 9, 20, 20, 3], seed=step)[rank::ranks]
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        results.append((result.loss, result.grad_norm, result.lr))
    return results


def whole(kind: str) -> Steps:
    """Six steps."""
    return train(trainer_of(kind), 6)


def first_half(kind: str, root: Path) -> Steps:
    """Three steps and a checkpoint."""
    trainer = trainer_of(kind)
    results = train(trainer, 3)
    save_checkpoint(trainer, root / kind, 3, {}, keep=1)
    return results


def second_half(kind: str, root: Path) -> Steps:
    """Three steps from the checkpoint, by a trainer that had other weights and other moments."""
    trainer = trainer_of(kind, seed=1)
    train(trainer, 1)
    load_checkpoint(trainer, latest_checkpoint(root / kind))
    return train(trainer, 3)


def restored(kind: str, root: Path) -> dict[str, str]:
    """Digests of the weights as the checkpoint gives them back."""
    trainer = trainer_of(kind, seed=1)
    load_checkpoint(trainer, latest_checkpoint(root / kind))
    return {name: tensor_digest(tensor) for name, tensor in trainer.export().items()}


def found_by_rank(root: Path, resumed: Path, kinds: list[str]) -> dict[str, dict[str, object]]:
    """Return on each rank the kinds whole and in halves, and the same from what lies in `resumed`."""
    return {
        kind: {
            "whole": whole(kind),
            "halves": first_half(kind, root) + second_half(kind, root),
            "restored": restored(kind, root),
            "other's second half": second_half(kind, resumed),
            "other's restored": restored(kind, resumed),
        }
        for kind in kinds
    }
