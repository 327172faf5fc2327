"""Experts under the names of model files, on the embedded engine."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engines.embedded.prepared_weights import prepare_weights
from bus.errors import EngineError

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def make(kind, seed):
    torch.manual_seed(seed)
    if kind == "mixtral":
        return MixtralForCausalLM._from_config(MixtralConfig(**SIZES, num_local_experts=4))
    return Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16))


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def models(request, tmp_path):
    """A model, another one, and what the files of the other hold."""
    other = make(request.param, 1)
    other.save_pretrained(tmp_path)
    return make(request.param, 0), other, load_file(tmp_path / "model.safetensors")


def test_published_experts_become_the_models_own(models):
    model, other, files = models
    prepared = prepare_weights(model, files, complete=True)
    expected = other.state_dict()
    assert prepared.keys() == expected.keys()
    for name, tensor in prepared.items():
        assert torch.equal(tensor, expected[name])


def test_one_changed_expert_leaves_the_others_as_they_were(models):
    model, other, files = models
    name = next(name for name in files if name.endswith(("experts.2.up_proj.weight", "experts.2.w3.weight")))
    prepared = prepare_weights(model, {name: files[name]}, complete=False)
    [(target, tensor)] = prepared.items()
    expected = model.state_dict()[target].clone()
    half = expected.shape[1] // 2
    expected[2, half:] = other.state_dict()[target][2, half:]
    assert torch.equal(tensor, expected)


def test_missing_and_unknown_experts_are_refused(models):
    model, _, files = models
    name = next(name for name in files if ".experts.3." in name)
    with pytest.raises(EngineError, match=r"must be complete, .*experts.*_proj got \d of \d parts"):
        prepare_weights(model, {key: value for key, value in files.items() if key != name}, complete=True)
    with pytest.raises(EngineError, match="the model has 4 experts"):
        prepare_weights(model, {name.replace(".3.", ".4."): files[name]}, complete=False)
    with pytest.raises(EngineError, match=r"has shape \(1, 1\)"):
        prepare_weights(model, {name: torch.zeros(1, 1)}, complete=False)
