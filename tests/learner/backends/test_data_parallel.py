"""Ranks with a share of the samples each train as one does, and go on from what another number has saved."""

from pathlib import Path

import pytest
import torch.distributed as dist

from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.tiny import TIS, random_samples, tiny_model
from tests.learner.worlds import Worlds


def train(mode: str, checkpoints: Path) -> list[list[float]]:
    """Return [loss, grad norm, tokens] of each of three steps, behind a checkpoint or before one."""
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


def trained_by(worlds: Worlds, ranks: int, mode: str, checkpoints: Path) -> list[list[float]]:
    """Return what the first of so many ranks finds; one is this process."""
    return train(mode, checkpoints) if ranks == 1 else worlds.run(ranks, train, mode, checkpoints)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.nightly), (1, 2)])
def test_ranks_share_a_step_and_a_checkpoint_resumes_on_another_number_of_them(
    worlds, tmp_path, before, after
):
    steps = trained_by(worlds, before, "save", tmp_path) + trained_by(worlds, after, "resume", tmp_path)
    alone = train("save", tmp_path / "alone") + train("resume", tmp_path / "alone")
    for found, expected in zip(steps, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
