"""Steps that `launch retrain` trains are packed as the run packed them, of which settings may say nothing."""

import asyncio
from contextlib import nullcontext

import pytest

from launch.operations import retrain as operation
from launch.services.learner import learner_settings
from launch.settings.run_config import resolve
from learner.config.model import ScratchModel
from learner.history import retrain as history
from learner.initial import micro_batch
from learner.initial.scratch_model import build_model_directory
from storage.disk.run_directory import RunDirectory

SIZES = ScratchModel(hidden_size=8, layers=1, heads=1, kv_heads=1, intermediate_size=8, context=64)


@pytest.mark.parametrize("overrides", [{}, {"learner": {"optimizer": {"lr": 1e-3}}}])
def test_steps_are_trained_again_in_micro_batches_that_fit_this_host(tmp_path, monkeypatch, overrides):
    model = build_model_directory(tmp_path / "model", SIZES, seed=0)
    config, run = resolve({}, {"model": {"path": str(model)}}), RunDirectory(tmp_path, "past")
    found = []

    def retrain_steps(*_, changed, **__):
        found.append(changed)
        return iter(())

    monkeypatch.setattr(micro_batch, "memory_bytes", lambda: 40_000_000)
    monkeypatch.setattr(history, "retrain_steps", retrain_steps)
    monkeypatch.setattr(operation, "as_then", lambda *_: nullcontext((None, None, [])))
    asyncio.run(operation.retrain(run, config, overrides, (0, 1), asyncio.Event()))
    [changed] = found
    ours = learner_settings(config, run)[0].learner.batch
    assert 256 < ours.tokens_per_micro_batch < 16384
    assert changed.batch == ours
    assert changed.optimizer.lr == overrides.get("learner", {}).get("optimizer", {}).get(
        "lr", config.learner.optimizer.lr
    )
