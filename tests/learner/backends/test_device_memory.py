"""A learner that leaves its device to others between two steps."""

import pytest
import torch

from learner.backends.megatron.core.ddp import restore_gradients
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model


def gradient_bytes(trainer: Trainer) -> int:
    return sum(
        buffer.grad_data.untyped_storage().nbytes() for chunk in trainer.ddp for buffer in chunk.buffers
    )


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_steps_are_the_same_though_the_gradients_gave_way_between_them(offload):
    model = tiny_model()
    optimizer = OptimizerConfig(lr=1e-2, offload=offload)
    kept, yielding = (Trainer(model.config, hf_state(model), optimizer) for _ in range(2))
    for step in range(3):
        batches = pack(random_samples([5, 17, 2, 32], seed=step), 40)
        for trainer in (kept, yielding):
            result = trainer.train_step(batches, TIS, policy_version=3)
            assert not result.skipped
            if trainer is yielding:
                before = gradient_bytes(trainer)
                trainer.release_memory()
                assert (before > 0, gradient_bytes(trainer)) == (True, 0)
                trainer.release_memory()  # once more does no harm
        exported = yielding.export()
        assert all(torch.equal(exported[name], tensor) for name, tensor in kept.export().items())
    restore_gradients(yielding.ddp)
    assert gradient_bytes(yielding) == gradient_bytes(kept)
