import numpy as np
import pytest
import torch

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.optimizer.saved_shards import boxes
from learner.checkpoint.commit import load_checkpoint, start_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from storage.disk.checkpoints import latest
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 6), (6, 1), (2, 1, 3)])
def test_boxes_have_the_elements_of_a_range_each_once_and_in_order(shape):
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start in range(elements.size + 1):
        for end in range(start, elements.size + 1):
            found = [
                elements[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].ravel()
                for box in boxes(shape, start, end)
            ]
            assert len(found) <= max(1, 2 * len(shape) - 1)
            assert [*np.concatenate([np.empty(0, int), *found])] == [*range(start, end)]


def test_training_of_the_other_backend_goes_on_too_and_does_not_show_in_a_checkpoint(tmp_path, held_writer):
    model, batches = tiny_model(), pack(random_samples([5, 17]), 40)
    first = FsdpTrainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    first.train_step(batches, TIS, policy_version=0)
    pending = start_checkpoint(first, tmp_path, 1, {}, keep=1)
    uninterrupted = [first.train_step(batches, TIS, policy_version=1).loss for _ in range(2)]
    held_writer.set()
    pending.finish()
    second = FsdpTrainer(model.config, hf_state(tiny_model(seed=1)), OptimizerConfig(lr=1e-2))
    load_checkpoint(second, latest(tmp_path))
    resumed = [second.train_step(batches, TIS, policy_version=1).loss for _ in range(2)]
    assert resumed == uninterrupted
    assert torch.isfinite(torch.tensor(resumed)).all()


@pytest.mark.parametrize("matrices", ["adamw", "muon"])
def test_memory_is_prepared_for_what_a_checkpoint_of_the_other_backend_copies(
    tmp_path, monkeypatch, matrices
):
    model = tiny_model()
    trainer = FsdpTrainer(model.config, hf_state(model), OptimizerConfig(matrices=matrices))
    prepared = []
    monkeypatch.setattr(
        trainer._checkpoint_buffers,
        "prepare",
        lambda tensors: prepared.extend(each.shape for each in tensors),
    )
    trainer.prepare_checkpoints()
    trainer.train_step(pack(random_samples([5, 17]), 40), TIS, policy_version=0)
    staged = trainer.stage_checkpoint(tmp_path)
    assert prepared == [each.shape for each in staged.copies._waiting.values()]
