"""`launch doctor`: what it finds of a model directory."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bus.errors import ConfigError
from launch.doctor.findings import Finding
from launch.doctor.model import check_model
from launch.model_files.model_directory import refuse_not_finite_model
from launch.settings.run_config import RunConfig, validate
from tests.learner.tiny import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory of a context of 64, which tests copy from."""
    from learner.initial.scratch_model import character_tokenizer

    directory = tmp_path_factory.mktemp("whole")
    tiny_model("qwen3", seed=0).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def look(model: Path | None, **sampling: object) -> list[Finding]:
    return list(check_model(validate({"model": {"path": model}, "sampling": sampling})))


def test_a_whole_model_is_well(model: Path):
    loaded, weights, training = look(model, max_new_tokens=8)
    assert (loaded.level, weights.level, training.level) == ("ok", "ok", "ok")
    assert "qwen3, context" in loaded.found
    assert "in 1 files" in weights.found
    assert training.found == "learner.backend=megatron trains this model"


def test_what_a_start_would_refuse_is_an_error(model: Path):
    *_, training = check_model(validate({
        "model": {"path": model}, "sampling": {"max_new_tokens": 8},
        "learner": {"parallel": {"tensor": 3}, "world": {"processes": 3}},
    }))  # fmt: skip
    assert (training.level, "num_attention_heads=4 does not divide by tensor=3" in training.found) == (
        "error", True,
    )  # fmt: skip
    assert "choose a divisor" in training.remedy


def test_without_a_model_there_is_nothing_to_look_at():
    assert [finding.level for finding in check_model(RunConfig())] == ["ok"]


def test_no_model_directory_is_an_error(tmp_path: Path):
    [found] = look(tmp_path / "nowhere")
    assert (found.level, "there is no such directory" in found.found) == ("error", True)


def test_a_name_of_the_hub_that_was_not_fetched_is_a_warning():
    [found] = look(Path("sluice-test/no-such-model"))
    assert (found.level, found.remedy.startswith("fetch it before")) == ("warning", True)
    assert "sluice-test/no-such-model is not on this host" in found.found


def test_a_file_that_was_cut_short_is_an_error(model: Path):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    [*_, found] = look(model, max_new_tokens=8)
    assert (found.level, "model.safetensors is damaged" in found.found) == ("error", True)


def test_a_file_that_the_index_names_must_be_there_with_its_tensors(model: Path):
    (model / "model.safetensors").unlink()
    save_file({"a": np.zeros(2, np.float32)}, model / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    [*_, found] = look(model, max_new_tokens=8)
    assert (found.level, found.found) == ("error", f"{model} lacks 1 tensors, such as b")
    index["weight_map"]["b"] = "two.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    [*_, found] = look(model, max_new_tokens=8)
    assert (found.level, "two.safetensors" in found.found) == ("error", True)


def test_weights_that_are_not_finite_are_an_error_and_refused_by_a_dry_run(model: Path):
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    [*_, found] = look(model, max_new_tokens=8)
    broken = f"{model}: 1 weights hold NaN or infinity, such as model.layers.1.mlp.down_proj.weight"
    assert (found.level, found.found) == ("error", broken)
    with pytest.raises(ConfigError, match=rf"^{broken}: download the directory again"):
        refuse_not_finite_model(validate({"model": {"path": model}}))


@pytest.mark.parametrize("index", [{}, [], {"weight_map": ["a"]}, {"weight_map": None}])
def test_an_index_without_a_map_is_an_error(index: object, model: Path):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded, weights = look(model, max_new_tokens=8)
    assert (loaded.level, weights.level) == ("ok", "error")
    assert "model.safetensors.index.json has no weight_map" in weights.found
    assert weights.remedy


def test_a_head_that_is_to_be_trained_and_that_the_model_does_not_have_is_an_error(model: Path):
    config = validate({
        "model": {"path": model}, "sampling": {"max_new_tokens": 8}, "learner": {"mtp": {"weight": 0.2}}
    })  # fmt: skip
    *_, head = check_model(config)
    assert (head.level, "a qwen3 with num_nextn_predict_layers=0" in head.found) == ("error", True)
    assert head.remedy.startswith("set the weight to 0")


def test_a_model_that_tells_no_context_is_an_error_and_its_weights_are_looked_at(model: Path):
    config = {"model_type": "bloom", "hidden_size": 8, "n_layer": 1, "n_head": 1, "vocab_size": 99}
    (model / "config.json").write_text(json.dumps(config))
    loaded, weights = look(model, max_new_tokens=8)
    assert (loaded.level, "max_position_embeddings=None is no context" in loaded.found) == ("error", True)
    assert "bounded context" in loaded.remedy
    assert weights.level == "ok"


def test_a_configuration_of_another_shape_is_an_error(model: Path):
    (model / "config.json").write_text("[]")
    first = look(model, max_new_tokens=8)[0]
    assert (first.level, "it is a list" in first.found) == ("error", True)


def test_transformers_that_does_not_load_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    loaded, weights = look(model, max_new_tokens=8)
    assert (loaded.level, "transformers does not load" in loaded.found) == ("error", True)
    assert weights.level == "ok"


def test_without_weights_it_is_no_model(model: Path):
    (model / "model.safetensors").unlink()
    [*_, found] = look(model, max_new_tokens=8)
    assert (found.level, "has neither model.safetensors nor" in found.found) == ("error", True)


def test_an_index_beside_a_single_file_is_not_looked_at(model: Path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {found.level for found in look(model, max_new_tokens=8)} == {"ok"}


def test_a_garbled_configuration_is_an_error(model: Path):
    (model / "config.json").write_text("{")
    first = look(model, max_new_tokens=8)[0]
    assert (first.level, "cannot read" in first.found) == ("error", True)


def test_a_tokenizer_without_a_chat_template_is_an_error(model: Path):
    for file in ("chat_template.jinja",):
        (model / file).unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert [finding.level for finding in look(model, max_new_tokens=8)] == ["ok", "error", "ok"]


def test_answers_that_leave_no_room_for_a_prompt_are_an_error(model: Path):
    [*_, found] = look(model, max_new_tokens=1 << 20)
    assert (found.level, found.remedy) == ("error", "lower it")
