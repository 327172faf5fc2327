"""Checkpoints, conversions and exports that the disk refuses end with the place and the remedy, not a bug."""

import errno
import os
import re
import resource
from pathlib import Path
from unittest.mock import patch

import pytest

from bus.errors import DiskFullError, StorageError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.checkpoint import commit
from learner.checkpoint.commit import save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.convert.megatron import hf_to_megatron
from learner.model_directories.model_directory import save_hf_directory
from storage.disk import checkpoints
from tests.learner.division import divide_world
from tests.learner.tiny import hf_state, tiny_config, tiny_model

LIMIT = "may not grow further: raise the limit of files' sizes"


@pytest.fixture
def small_files():
    """Limits how far files may grow, when it is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", [Trainer, FsdpTrainer])
def test_a_checkpoint_says_why_it_could_not_be_written(tmp_path, small_files, kind):
    model = tiny_model()
    trainer = kind(model.config, hf_state(model), OptimizerConfig())
    small_files()
    with pytest.raises(StorageError, match=f"cannot write checkpoint .*/step_00000001: rank 0: .* {LIMIT}"):
        save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    assert checkpoints.latest(tmp_path) is None


def refused_manifest(root: Path) -> str:
    """Return why a checkpoint failed on this rank, when the disk of rank 0 has no room for its manifest."""
    divide_world(ParallelConfig())
    model = tiny_model()
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(commit, "write_manifest", side_effect=full), pytest.raises(DiskFullError) as failed:
        save_checkpoint(trainer, root, 1, {}, keep=1)
    return str(failed.value)


def test_every_rank_hears_that_the_manifest_could_not_be_written(worlds, tmp_path):
    said = worlds.run(2, refused_manifest, tmp_path)
    assert said[0] == said[1]
    assert re.search(r"cannot write checkpoint .*: rank 0: the disk is full, .*step_00000001", said[0])
    assert checkpoints.latest(tmp_path) is None


def test_a_conversion_says_why_it_could_not_be_written_and_leaves_nothing(tmp_path, small_files):
    save_hf_directory(tmp_path / "hf", tiny_config(), hf_state(tiny_model()), None)
    small_files()
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}/megatron: {tmp_path}/megatron {LIMIT}"):
        hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
