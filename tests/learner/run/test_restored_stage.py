"""A backend is built for the stage that trains it first, where its settings allow one."""

from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import ConfigError
from learner.config.warmup import WarmupConfig
from learner.initial.initial import Initial, prepare
from learner.progress.progress import Progress
from learner.run import restore
from learner.run.restore import restore_alone
from tests.learner.run.stage_settings import settings_of
from tests.learner.tiny import tiny_config


def test_a_run_without_warm_up_begins_with_what_only_reinforcement_learning_offloads(tmp_path: Path):
    settings = settings_of(tmp_path, optimizer={"offload": 1})
    progress = Progress()
    backend = restore_alone(settings, prepare(settings, None), None, progress)
    assert (progress.stage, backend.optimizer_config.offload) == ("rl", 1)


def test_matrices_that_muon_cannot_tell_apart_are_refused_before_a_warm_up_begins(tmp_path):
    settings = settings_of(tmp_path, optimizer={"matrices": "muon"})
    settings = replace(settings, warmup=WarmupConfig(steps=1))
    with pytest.raises(ConfigError, match=r"muon cannot tell the matrices apart that .*linear_attn"):
        restore_alone(settings, Initial(tiny_config("qwen3_5_text"), {}, None), None, Progress())


def test_weights_that_cannot_be_published_in_codes_are_refused_before_a_model_is_built(tmp_path, monkeypatch):
    settings = settings_of(tmp_path, publication={"quantisation": "int4"})
    initial = prepare(settings, None)
    monkeypatch.setattr(restore, "build_backend", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match="columns, and int4 has a scale for each 128 of them"):
        restore_alone(settings, initial, None, Progress())


def test_a_directory_that_takes_no_optimizer_state_is_refused_before_a_model_is_built(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    optimizer = {"offload": 1, "offload_directory": tmp_path / "file"}
    settings = settings_of(tmp_path, backend="megatron", optimizer=optimizer)
    initial = prepare(settings, None)
    monkeypatch.setattr(restore, "build_backend", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ConfigError, match=r"offload_directory=.*/file cannot take"):
        restore_alone(settings, initial, None, Progress())
