"""Engines get the weights that the learner computes with: one dtype is followed everywhere."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.weights.follow import fetch_state
from bus.codec import decode
from bus.errors import ConfigError
from bus.messages import ModelFiles, PolicyManifest
from launch.settings.run_config import resolve
from learner.config.learner import LearnerConfig
from learner.config.model import ModelConfig
from learner.initial.scratch_model import ensure_model_directory
from learner.model_directories.dtypes import compute_dtype, published_bytes, published_dtype
from learner.model_directories.model_directory import HFWeights
from storage.model_files.packed_files import with_dtype
from storage.weights.blob_sources import Blobs
from tests.learner.mini_run import SCRATCH, in_one_process, mini_run

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("model", "publish", "on_gpu", "trained", "published"),
    [
        ({}, "auto", False, F32, F32),
        ({}, "auto", True, BF16, BF16),
        ({"dtype": "float32"}, "auto", True, F32, F32),
        ({"dtype": "bfloat16"}, "auto", False, BF16, BF16),
        ({"dtype": "bfloat16"}, "float32", False, BF16, F32),
        ({"numerics": "exact"}, "auto", True, F32, F32),
        ({"numerics": "sglang"}, "auto", False, BF16, BF16),
    ],
)
def test_the_published_dtype_follows_that_of_the_learner(
    model, publish, on_gpu, trained, published, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert compute_dtype(ModelConfig(**model)) == trained
    assert published_dtype(LearnerConfig(publish_dtype=publish), ModelConfig(**model)) == published


def test_a_coarser_dtype_is_refused_at_the_start_or_where_the_learners_host_decides(monkeypatch):
    with pytest.raises(ConfigError, match=r"publish_dtype=bfloat16 is coarser than model.dtype=float32"):
        resolve({"model": {"dtype": "float32"}, "learner": {"publish_dtype": "bfloat16"}})
    resolve({"learner": {"publish_dtype": "bfloat16"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"is coarser than the learner's model.dtype=float32"):
        published_dtype(LearnerConfig(publish_dtype="bfloat16"), ModelConfig())


def test_the_size_counts_weights_and_nothing_else(tmp_path):
    tensors = {"w": torch.zeros(3, 5), "ids": torch.zeros(99, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert published_bytes(HFWeights(tmp_path), BF16) == 30


def test_servers_are_told_the_published_dtype():
    config = {"torch_dtype": "bfloat16", "a": 1, "text_config": {"dtype": "bfloat16", "b": 2}}
    files = ModelFiles(names=("a.txt", "config.json"), contents=(b"kept", json.dumps(config).encode()))
    told = with_dtype(files, "float32")
    assert (told.names, told.contents[0]) == (files.names, b"kept")
    assert json.loads(told.contents[1]) == {
        "a": 1, "dtype": "float32", "text_config": {"b": 2, "dtype": "float32"},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.nats
async def test_a_learner_in_float32_publishes_float32_though_its_model_is_in_bfloat16(
    bus, tmp_path, monkeypatch
):
    in_one_process(monkeypatch)
    ensure_model_directory(tmp_path / "model", SCRATCH, seed=3)
    file = tmp_path / "model/model.safetensors"
    save_file({name: weight.to(BF16) for name, weight in load_file(file).items()}, file)
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    async with mini_run(bus, tmp_path) as run:
        await run.train(steps=1)
    [manifest, _] = await bus.get("policy", PolicyManifest)
    found = await fetch_state(Blobs(bus), manifest)
    assert {weight.dtype for weight in found.values()} == {F32}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in found.values())
    files = decode(await Blobs(bus).get(manifest.model), ModelFiles)
    assert json.loads(files.contents[files.names.index("config.json")])["dtype"] == "float32"
