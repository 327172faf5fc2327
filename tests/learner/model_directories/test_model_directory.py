import ast
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config

from bus.errors import ConfigError
from learner.model_directories.model_directory import (
    HFWeights,
    load_hf_config,
    save_hf_directory,
    stream_hf_directory,
)
from tests.learner.tiny import hf_state, tiny_model


def test_weights_that_come_one_after_another_are_written_as_those_that_are_all_there(tmp_path):
    model = tiny_model()
    state, whole, streamed = hf_state(model), tmp_path / "whole", tmp_path / "streamed"
    shard_bytes = 3 * max(weight.nbytes for weight in state.values())
    save_hf_directory(whole, model.config, state, None, shard_bytes=shard_bytes)
    stream_hf_directory(streamed, model.config, iter(state.items()), None, shard_bytes=shard_bytes)

    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert len(files) > 4
    assert {path.name: path.read_bytes() for path in streamed.iterdir()} == files


def test_a_single_file_of_streamed_weights_is_loaded_by_transformers(tmp_path):
    model = tiny_model()
    reused = torch.empty(max(weight.numel() for weight in hf_state(model).values()))

    def one_buffer():
        for name, weight in hf_state(model).items():  # each is good until the next
            yield name, reused[: weight.numel()].copy_(weight.flatten()).view_as(weight)

    stream_hf_directory(tmp_path, model.config, one_buffer(), None)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    weights = HFWeights(tmp_path)
    assert all(torch.equal(weights[name], weight) for name, weight in hf_state(model).items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in model.state_dict().items())


CUSTOM = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("changes", [{}, CUSTOM])
def test_kimis_published_configuration_is_refused_with_the_remedy(tmp_path, changes):
    config = tiny_model("deepseek_v3").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"model_type": "kimi_k2"}))
    with pytest.raises(ConfigError, match=r"kimi_k2, .*deepseek_v3 of it by `launch convert hf-to-megatron"):
        load_hf_config(tmp_path)


def test_programs_of_a_model_directory_are_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (tmp_path / "config.json").write_text(json.dumps(CUSTOM | {"model_type": "own"}))
    ran = tmp_path / "ran"
    program = f"open({str(ran)!r}, 'w').close()\nfrom transformers import PretrainedConfig as OwnConfig\n"
    (tmp_path / "configuration_own.py").write_text(program)
    with pytest.raises(ConfigError, match="contains custom code"):
        load_hf_config(tmp_path)
    assert not ran.exists()


def test_every_place_that_loads_a_model_directory_leaves_its_programs_alone():
    loads = [
        (file, node)
        for package in ("actors", "launch", "learner", "storage")
        for file in (ROOT / package).rglob("*.py")
        if ".from_pretrained(" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("Auto")
        and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert len(loads) > 10
    for file, load in loads:
        assert "trust_remote_code=False" in ast.unparse(load), f"{file}:{load.lineno}"


def test_a_family_that_an_older_transformers_gets_wrong_is_refused_with_the_version_that_it_needs(
    tmp_path, monkeypatch
):
    for kind, config in (("gpt_oss", GptOssConfig()), ("qwen3", Qwen3Config())):
        config.save_pretrained(tmp_path / kind)
        load_hf_config(tmp_path / kind)
    monkeypatch.setattr("transformers.__version__", "5.12.1")
    load_hf_config(tmp_path / "qwen3")
    with pytest.raises(ConfigError, match=r"a gpt_oss needs transformers 5\.19 or later, and 5\.12\.1 is"):
        load_hf_config(tmp_path / "gpt_oss")
    monkeypatch.setattr("transformers.__version__", "5.19.0")
    load_hf_config(tmp_path / "gpt_oss")
