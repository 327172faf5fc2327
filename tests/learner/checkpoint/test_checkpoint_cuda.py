"""Checkpoints from a GPU, whose copies lie in memory that is used again: `pytest -m gpu tests/learner`."""

import mmap

import pytest
import torch

from learner.checkpoint.commit import load_checkpoint, start_checkpoint
from learner.host_memory import copies
from learner.host_memory.copies import CopyBuffers
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.checkpoint.saved_trainers import train, trainer_of
from tests.learner.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_a_copy_crosses_borders_of_memory_that_was_locked_beside_other_work(monkeypatch):
    monkeypatch.setattr(copies, "LOCKED_BYTES", mmap.PAGESIZE)
    buffers, whole = CopyBuffers(), torch.arange(9000.0, device="cuda")
    tensors = [whole[:700], whole.reshape(90, 100).T, whole[7:8]]
    buffers.prepare(tensors)
    for _ in range(2):
        copied = buffers.copies(tensors)
        found = [copied.take(number) for number in range(3)]
        assert buffers.is_locked
        assert copied.copied_s > 0
        assert all(copy.is_pinned() for copy in found)
        assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(found, tensors, strict=True))
        whole += 1


def test_the_first_checkpoint_takes_the_memory_that_was_prepared(tmp_path):
    trainer = trainer_of(tiny_model(), dtype=torch.bfloat16)
    trainer.prepare_checkpoints()
    prepared = trainer._checkpoint_buffers._memory
    assert prepared is not None
    train(trainer, [1])
    pending = start_checkpoint(trainer, tmp_path, 1, {}, keep=2)
    pending.finish()
    assert trainer._checkpoint_buffers._memory is prepared
    assert pending.seconds["copy"] > 0


def test_buffers_are_used_again_as_long_as_tensors_fit():
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
    assert other.data_ptr() == address
    assert torch.equal(other, torch.zeros(2, 3))
    larger = buffers.copies([torch.arange(5000.0, device="cuda")]).take(0)
    assert larger.tolist() == [*range(5000)]


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
