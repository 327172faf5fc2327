"""A step that does not fit into a GPU's memory ends with what to set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from bus.errors import ConfigError, TrainingError
from bus.requests import GroupRef
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.progress.failed_step import FailedStep
from learner.world.rank import Rank
from tests.factories import make_trajectory
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.prefetch_settings import settings
from tests.learner.world.test_foreign_tokens import Reading


def test_a_step_that_succeeded_since_may_fail_again_before_it_ends_the_run(tmp_path: Path):
    file = tmp_path / "failed_step.json"

    def start(step: str, *, fails: bool) -> None:
        """Start a rank, which trains on one step."""
        with FailedStep(file).noted(step):
            if fails:
                raise TrainingError("no room")

    with pytest.raises(TrainingError):
        start("step 2", fails=True)
    start("step 1", fails=False)  # the checkpoint is of the step before
    assert file.exists()
    start("step 2", fails=False)
    assert not file.exists()
    with pytest.raises(TrainingError):
        start("step 2", fails=True)  # after a rollback, say
    ranks = [FailedStep(file) for _ in range(2)]
    for rank in ranks:
        with rank.noted("step 2"):
            pass
    with pytest.raises(TrainingError), ranks[0].noted("step 2"):
        raise TrainingError("no room")


@pytest.mark.parametrize(
    ("recompute", "said"), [("none", "set learner.parallel.recompute=full, or lower "), ("full", "lower ")]
)
async def test_a_step_without_room_names_the_settings_that_make_some_and_ends_the_run_when_it_fails_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: Literal["none", "full"], said: str
):
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 516.00 MiB.")

    model, made = tiny_model(), make_trajectory(1)
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig())
    monkeypatch.setattr(trainer, "train_step", no_room)
    given = settings(tmp_path, 1)
    learner = given.learner.model_copy(update={"parallel": ParallelConfig(recompute=recompute)})

    async def train(step: int) -> None:
        """Start the rank and train it on one step."""
        reading = Reading([[replace(made, token_ids=made.token_ids % model.config.vocab_size)]])
        rank = Rank(
            trainer, replace(given, learner=learner), reader=reading, demonstrations=None, thread=thread
        )
        rank.fetch(step, [(GroupRef(lease_id=1, shard=0),)], "a")
        await rank.train(step, 0, {})

    tokens = r"learner.batch.tokens_per_micro_batch=\d+; .*Tried to allocate 516.00 MiB"
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(TrainingError, match=f"rank 0: {said}{tokens}"):
            await train(1)
        with pytest.raises(TrainingError):  # this start got further
            await train(2)
        with pytest.raises(ConfigError, match=f"step 2 failed again after a restart: .*{said}{tokens}"):
            await train(2)
