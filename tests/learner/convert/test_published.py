"""DeepSeek's and Moonshot's checkpoints as they are published become models that can be trained."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bus.errors import ConfigError
from learner.backends.model_loading import load_hf_directory
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
from learner.model_directories.model_directory import load_hf_config
from tests.learner.backends.model.built import build_model
from tests.learner.tiny import tiny_model

BLOCK = 16
"""Smaller than the usual 128, so that blocks at the edges of tiny weights are cut off."""
SCALED = ("_proj.weight", "_with_mqa.weight")


def published(path, **changes):
    """A tiny model in fp8, with a layer behind it; return what its weights are."""
    tiny_model("deepseek_v3", num_mtp_layers=1).to(torch.bfloat16).save_pretrained(path)
    [file] = path.glob("*.safetensors")
    expected, stored = load_file(file), {}
    for name, weight in expected.items():
        if not name.endswith(SCALED):
            stored[name] = weight
            continue
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scales = torch.rand(rows, columns) / 100 + 0.001
        spread = torch.kron(scales, torch.ones(BLOCK, BLOCK))[: weight.shape[0], : weight.shape[1]]
        stored[name] = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        expected[name] = (stored[name].float() * spread).to(torch.bfloat16)
    head = "model.layers.2.eh_proj.weight"
    expected[head] = stored[head] = torch.randn(64, 128, dtype=torch.bfloat16)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    written = {**config, "quantization_config": fp8, "auto_map": auto_map, **changes}
    (path / "config.json").write_text(json.dumps(written))
    return expected


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_fp8_weights_become_bfloat16_times_the_scales_of_their_blocks(tmp_path, model_type):
    expected = published(tmp_path / "fp8", model_type=model_type)
    done = hf_to_megatron(tmp_path / "fp8", tmp_path / "megatron")
    assert str(done).endswith("verified, 1 of them of heads for several next tokens")
    config, state = load_hf_directory(tmp_path / "megatron")
    assert (config.model_type, getattr(config, "quantization_config", None)) == ("deepseek_v3", None)
    assert state.keys() == expected.keys()
    assert all(state[name].equal(weight) for name, weight in expected.items())
    megatron_to_hf(tmp_path / "megatron", tmp_path / "bf16")
    [file] = (tmp_path / "bf16").glob("*.safetensors")
    assert all(weight.equal(expected[name]) for name, weight in load_file(file).items())


def test_scales_of_other_blocks_are_refused(tmp_path):
    published(tmp_path / "fp8")
    [file] = (tmp_path / "fp8").glob("*.safetensors")
    stored = load_file(file)
    name = "model.layers.0.self_attn.q_b_proj.weight_scale_inv"
    save_file({**stored, name: stored[name][:1].clone()}, file)
    with pytest.raises(ConfigError, match=r"q_b_proj\.weight_scale_inv must be \[8, 3\], and is \[1, 3\]"):
        hf_to_megatron(tmp_path / "fp8", tmp_path / "out")
    del stored[name]
    save_file(stored, file)
    with pytest.raises(ConfigError, match=r"q_b_proj\.weight is in fp8.*has no scales"):
        hf_to_megatron(tmp_path / "fp8", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"), [({"model_type": "gpt9"}, "gpt9"), ({"kv_lora_rank": "narrow"}, "kv_lora_rank")]
)
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path, changes, says):
    published(tmp_path / "fp8", **changes)
    with pytest.raises(ConfigError, match=rf"cannot read .*config\.json: .*{says}"):
        hf_to_megatron(tmp_path / "fp8", tmp_path / "out")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, r"weight_block_size=\[0, 16\] is no pair of"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128 is no pair of"),
        ([], r"quantization_config=\[\] is no object"),
    ],
)
def test_blocks_that_cannot_be_read_are_refused_in_words(tmp_path, quantization, says):
    published(tmp_path / "fp8", quantization_config=quantization)
    with pytest.raises(ConfigError, match=says):
        hf_to_megatron(tmp_path / "fp8", tmp_path / "out")


def test_other_quantization_and_training_from_fp8_are_refused_with_the_remedy(tmp_path):
    published(tmp_path / "fp8")
    with pytest.raises(ConfigError, match="becomes bfloat16 by launch convert hf-to-megatron"):
        build_model(load_hf_config(tmp_path / "fp8"), dtype=torch.float32)
    published(tmp_path / "int4", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(ConfigError, match=r"quantization_config=.*load the unquantized model"):
        hf_to_megatron(tmp_path / "int4", tmp_path / "out")
