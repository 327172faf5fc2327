"""A step that does not fit into a GPU's memory ends with what to set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from bus.errors import TrainingError
from bus.requests import GroupRef
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.world.rank import Rank
from tests.factories import make_trajectory
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.prefetch_settings import settings
from tests.learner.world.test_foreign_tokens import Reading


@pytest.mark.parametrize(
    ("recompute", "said"), [("none", "set learner.parallel.recompute=full, or lower "), ("full", "lower ")]
)
async def test_a_step_without_room_names_the_settings_that_make_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: Literal["none", "full"], said: str
):
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 516.00 MiB.")

    model, made = tiny_model(), make_trajectory(1)
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig())
    monkeypatch.setattr(trainer, "train_step", no_room)
    given = settings(tmp_path, 1)
    learner = given.learner.model_copy(update={"parallel": ParallelConfig(recompute=recompute)})
    with ThreadPoolExecutor(1) as thread:
        reading = Reading([[replace(made, token_ids=made.token_ids % model.config.vocab_size)]])
        rank = Rank(
            trainer, replace(given, learner=learner), reader=reading, demonstrations=None, thread=thread
        )
        rank.fetch(1, [(GroupRef(lease_id=1, shard=0),)], "a")
        tokens = r"learner.batch.tokens_per_micro_batch=\d+; .*Tried to allocate 516.00 MiB"
        with pytest.raises(TrainingError, match=f"rank 0: {said}{tokens}"):
            await rank.train(1, 0, {})
