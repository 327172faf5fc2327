import pytest
import torch
from transformers import AutoModelForCausalLM

from bus.errors import ConfigError
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.backends.model_loading import load_hf_directory
from learner.model_directories.model_directory import save_hf_directory
from tests.learner.backends.model.built import build_model, export_hf_weights
from tests.learner.tiny import FAMILIES, hf_state, tiny_config, tiny_model


@pytest.mark.first(6, others=pytest.mark.slow)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_out_bit_for_bit_as_they_went_in(family, tied):
    model = tiny_model(family, tied=tied)
    state = hf_state(model)
    built = build_model(model.config, dtype=torch.float32)
    load_hf_weights([built], model.config, state)
    exported = export_hf_weights([built], model.config)
    assert state.keys() - exported.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(exported[name], state[name]) for name in exported)
    assert not any(tensor.requires_grad for tensor in exported.values())


def test_an_export_does_not_change_when_the_model_does():
    model = tiny_model()
    built = build_model(model.config, dtype=torch.float32)
    load_hf_weights([built], model.config, model.state_dict())
    exported = export_hf_weights([built], model.config)
    before = {name: tensor.clone() for name, tensor in exported.items()}
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
    assert all(torch.equal(exported[name], before[name]) for name in before)


def test_all_misfits_are_named_at_once():
    model = tiny_model("llama")
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    state["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 64)
    state["model.layers.2.extra"] = torch.zeros(1)
    with pytest.raises(ConfigError) as error:
        load_hf_weights([build_model(model.config, dtype=torch.float32)], model.config, state)
    assert "missing model.norm.weight [64]" in str(error.value)
    assert "model.layers.1.self_attn.k_proj.weight is [3, 64], not [32, 64]" in str(error.value)
    assert "unexpected model.layers.2.extra" in str(error.value)


@pytest.mark.first(5, others=pytest.mark.slow)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_saved_directory(tmp_path, family, tied):
    model = tiny_model(family, tied=tied)
    built = build_model(model.config, dtype=torch.float32)
    load_hf_weights([built], model.config, hf_state(model))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    save_hf_directory(
        tmp_path / "out", model.config, export_hf_weights([built], model.config), tmp_path / "tokenizer"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_saved_directory_is_read_back(tmp_path):
    model = tiny_model(tied=True)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_hf_directory(tmp_path, model.config, state, None)
    config, loaded = load_hf_directory(tmp_path)
    assert config.model_type == "qwen3"
    assert config.tie_word_embeddings
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_directory_without_weights_says_what_is_missing(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_hf_directory(tmp_path)


def test_torn_weights_are_refused(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match="cannot read"):
        load_hf_directory(tmp_path)
