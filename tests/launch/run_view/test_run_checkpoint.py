"""Which directory a checkpoint of a run has its tokenizer from."""

from pathlib import Path

import pytest

from launch.run_view.source_run import described_by, newest_checkpoint
from launch.settings.run_config import resolve
from learner.model_directories.checkpoint_manifest import MANIFEST
from storage.disk.run_directory import RunDirectory


@pytest.mark.parametrize("model", ["given", "runs/mine/model"])
def test_a_checkpoint_has_the_tokenizer_of_the_model_with_which_its_run_began(tmp_path: Path, model: str):
    run = RunDirectory(tmp_path / "runs", "mine")
    given = {"path": tmp_path / model} if model == "given" else {}
    settings = resolve({"run": "mine", "data": {"task": "sort"}, "model": given})
    run.config.write_text(settings.model_dump_json())
    checkpoint = run.path / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text("{}")
    assert newest_checkpoint(run.path) == checkpoint
    assert described_by(checkpoint) is None
    (tmp_path / model).mkdir()
    (tmp_path / model / "tokenizer.json").write_text("{}")
    assert described_by(checkpoint) == tmp_path / model
