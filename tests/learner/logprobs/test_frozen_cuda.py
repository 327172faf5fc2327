"""Frozen policies in page-locked memory, switched on a GPU."""

import numpy as np
import pytest
import torch

from learner.backends.megatron.trainer import Trainer
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.logprobs.logprobs import score
from storage.disk.checkpoints import latest as latest_checkpoint
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.gpu


def trainer_of(seed: int, dtype: torch.dtype) -> Trainer:
    model = tiny_model(seed=seed)
    return Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_that_is_held_survives_training_and_a_checkpoint(tmp_path, dtype):
    trainer, samples = trainer_of(0, dtype), random_samples([5, 17, 2, 32, 9])
    first = score(trainer, samples, tokens_per_micro_batch=100)
    trainer.frozen.hold("reference")
    assert all(tensor.is_pinned() for tensor in trainer.frozen.weights("reference")[0].values())
    trainer.train_step(pack(samples, 40), TIS, policy_version=3)
    now = trainer.export()
    held = score(trainer, samples, policy="reference", tokens_per_micro_batch=100)
    assert all(
        np.array_equal(a.logprobs, b.logprobs, equal_nan=True) for a, b in zip(first, held, strict=True)
    )
    assert all(torch.equal(now[name], weight) for name, weight in trainer.export().items())
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    other = trainer_of(1, dtype)
    load_checkpoint(other, latest_checkpoint(tmp_path))
    again = score(other, samples, policy="reference", tokens_per_micro_batch=100)
    assert all(
        np.array_equal(a.logprobs, b.logprobs, equal_nan=True) for a, b in zip(first, again, strict=True)
    )
    assert all(torch.equal(now[name], weight) for name, weight in other.export().items())
