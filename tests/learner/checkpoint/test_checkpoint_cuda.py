"""Checkpoints from a GPU, whose copies lie in memory that is used again: `pytest -m gpu tests/learner`."""

import pytest
import torch

from learner.checkpoint.commit import load_checkpoint, start_checkpoint
from learner.host_memory.copies import CopyBuffers
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.checkpoint.saved_trainers import train, trainer_of
from tests.learner.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_buffers_are_used_again_by_tensors_of_the_same_shapes_only():
    buffers, tensor = CopyBuffers(), torch.arange(6.0, device="cuda")
    address = buffers.copies([tensor]).take(0).data_ptr()
    again = buffers.copies([tensor + 1])
    again.keep()
    tensor.zero_()  # behind the copy
    copy = again.take(0)
    assert copy.is_pinned()
    assert copy.data_ptr() == address
    assert torch.equal(copy, torch.arange(1.0, 7.0))
    other = buffers.copies([tensor.reshape(2, 3)]).take(0)
    assert torch.equal(other, torch.zeros(2, 3))


def test_checkpoints_that_share_buffers_each_have_their_own_weights_and_no_more(tmp_path):
    trainer, pending, exported = trainer_of(tiny_model(), dtype=torch.bfloat16), None, {}
    for step in (1, 2):
        train(trainer, [step])
        exported[step] = trainer.export()
        pending = start_checkpoint(trainer, tmp_path / str(step), step, {}, keep=2, after=pending)
        train(trainer, [step + 10])  # beside the writing
    pending.finish()
    held_bytes = sum(p.numel() for p in trainer.chunks[0].parameters()) * 14
    for step in (1, 2):
        saved = latest_checkpoint(tmp_path / str(step))
        assert sum(file.stat().st_size for file in saved.iterdir()) < 2 * held_bytes + 1_000_000
        restored = trainer_of(tiny_model(seed=1), dtype=torch.bfloat16)
        load_checkpoint(restored, saved)
        for name, tensor in restored.export().items():
            assert torch.equal(tensor, exported[step][name]), name
