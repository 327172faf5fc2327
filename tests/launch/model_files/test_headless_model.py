"""A head that is to be trained is looked for in the model's configuration, before anything is loaded."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from bus.errors import ConfigError
from launch.model_files.model_directory import refuse_headless_model
from launch.settings.run_config import resolve


def test_a_head_that_the_model_does_not_have_is_refused_before_anything_starts(tmp_path):
    layers = {"model": {"path": str(tmp_path)}}, {"learner": {"mtp": {"weight": 0.2}}}
    config = resolve(*layers)
    refuse_headless_model(config)  # what is not here, the learner will see
    for described in (
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        {"model_type": "glm4_moe"},
        {"hidden_size": 8},
        {"model_type": "qwen3_next"},  # whose weights would say it
        {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1},
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        refuse_headless_model(config)
    for described, said in (
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, "a deepseek_v3 with .*_layers=0, has"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": None}, "_layers=0, has no head"),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 2}, "_layers=2, has no head"),
        ({"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0, has no"),
        (
            {"model_type": "qwen3_5_text", "mtp_use_dedicated_embeddings": True},
            "mtp_use_dedicated_embeddings=true, has a head with an embedding of its own",
        ),
        ({"model_type": "qwen3_moe"}, "learner.mtp.weight=0.2: the model, a qwen3_moe with .*_layers=0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ConfigError, match=said):
            refuse_headless_model(config)
        refuse_headless_model(resolve(layers[0]))


@pytest.mark.parametrize(
    ("family", "counted", "begins", "of_head"),
    [
        ("deepseek_v3", {}, "model.layers.2.", "eh_proj.weight"),
        ("qwen3_next", {"num_nextn_predict_layers": 1}, "mtp.", "layers.0.mlp.gate.weight"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 1}, "mtp.", "layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_head_whose_weights_the_files_lack_is_refused_before_anything_starts(
    tmp_path, family, counted, begins, of_head
):
    described = {"model_type": family, "num_hidden_layers": 2, **counted}
    (tmp_path / "config.json").write_text(json.dumps(described))
    layers = {"model": {"path": str(tmp_path)}}, {"learner": {"mtp": {"weight": 0.2}}}
    config, one = resolve(*layers), np.zeros(2, np.float32)
    refuse_headless_model(config)  # files that are not here, the learner will see
    said = rf"weight=0\.2: the model, a {family} .*no weights of a head in its files \({begins}\): set"
    names = ["model.layers.1.input_layernorm.weight", "model.layers.20.input_layernorm.weight"]
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    for tensors, whole in ((names, False), ([*names, f"{begins}{of_head}"], True)):
        save_file(dict.fromkeys(tensors, one), file)
        _look(config, None if whole else said)
    file.unlink()
    for tensors, whole in ((names, False), ([*names, f"{begins}{of_head}"], True)):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "one.safetensors")}))
        _look(config, None if whole else said)
    index.write_text("[]")  # the learner says what is wrong with it
    _look(config, None)
    index.unlink()
    save_file(dict.fromkeys(names, one), file)
    _look(resolve(layers[0]), None)  # nobody trains the head


def _look(config, said):
    if said is None:
        refuse_headless_model(config)
        return
    with pytest.raises(ConfigError, match=said):
        refuse_headless_model(config)


def _write_shard(directory, number, *names):
    file, index = f"model-{number:05}-of-00003.safetensors", directory / "model.safetensors.index.json"
    save_file(dict.fromkeys(names, np.zeros(2, np.float32)), directory / file)
    known = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    index.write_text(json.dumps({"weight_map": known | dict.fromkeys(names, file)}))


def test_the_names_of_weights_tell_a_head_where_the_configuration_does_not(tmp_path):
    config = resolve({"model": {"path": str(tmp_path)}}, {"learner": {"mtp": {"weight": 0.2}}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    _write_shard(tmp_path, 1, "mtp.fc.weight")
    with pytest.raises(
        ConfigError, match=r"a qwen3_next with 0 layers `mtp\.layers\.\*` in its files, has no"
    ):
        refuse_headless_model(config)
    names = ("mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.layers.0.mlp.gate.weight")
    _write_shard(tmp_path, 2, *names)
    refuse_headless_model(config)
    _write_shard(tmp_path, 3, "mtp.layers.1.mlp.gate.weight")
    with pytest.raises(ConfigError, match="a qwen3_next with 2 layers"):
        refuse_headless_model(config)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    refuse_headless_model(config)  # whoever loads it says so
