"""Experts in MXFP4, as gpt-oss is published, against transformers' own conversion."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bus.errors import ConfigError, StorageError
from learner.backends.model_loading import load_hf_directory
from learner.convert.quantised_directory import dequantise
from learner.model_directories.quantised_weights import decoded
from tests.learner.backends.model.built import built_from
from tests.learner.tiny import hf_state, tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 32}
DOWN = "model.layers.1.mlp.experts.down_proj"


def weights(directory):
    [file] = directory.glob("*.safetensors")
    return load_file(file)


def published(directory, **changes):
    """A directory as gpt-oss is published: all but the experts' matrices in bfloat16. Returns what is in its
    files, and the experts' matrices by transformers' conversion."""
    model = tiny_model("gpt_oss", **SIZES).bfloat16()
    model.save_pretrained(directory)
    state, expected = hf_state(model), {}
    torch.manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 128, (experts, outputs, inputs // 32), dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    [file] = directory.glob("*.safetensors")
    state = {name: changes.get(name, tensor) for name, tensor in state.items()}
    save_file({name: tensor.contiguous() for name, tensor in state.items() if tensor is not None}, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return state, expected


def test_codes_and_exponents_are_those_of_the_standard():
    codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]], dtype=torch.uint8)
    found = decoded(codes, torch.tensor([[128]], dtype=torch.uint8))
    magnitudes = [0, 1, 2, 3, 4, 6, 8, 12]  # times 2
    assert found.tolist() == [[*magnitudes, *(-each for each in magnitudes)] * 2]


def test_weights_are_those_of_transformers_and_are_trained_from(tmp_path):
    state, expected = published(tmp_path / "mxfp4")
    dequantise(tmp_path / "mxfp4", tmp_path / "back", torch.bfloat16)
    found = weights(tmp_path / "back")
    assert (
        found.keys()
        == {name for name in state if not name.endswith(("_blocks", "_scales"))} | expected.keys()
    )
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.equal(expected.get(name, state.get(name))), name
    hf_config, read = load_hf_directory(tmp_path / "back")
    assert getattr(hf_config, "quantization_config", None) is None
    reference = tiny_model("gpt_oss", **SIZES)
    assert built_from(reference, dict(read)).config.num_moe_experts == 6


@pytest.mark.parametrize(
    ("tensor", "told", "error"),
    [
        (None, "down_proj_scales is missing: blocks must be", ConfigError),
        (torch.zeros(6, 64, 2, dtype=torch.uint8), r"down_proj_scales is \[6, 64, 2\]: blocks", ConfigError),
        (torch.full((6, 64, 1), 255, dtype=torch.uint8), "has 255, which is no number", StorageError),
    ],
)
def test_scales_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, tensor, told, error):
    published(tmp_path / "mxfp4", **{f"{DOWN}_scales": tensor})
    with pytest.raises(error, match=told):
        dequantise(tmp_path / "mxfp4", tmp_path / "back", torch.bfloat16)
    assert not (tmp_path / "back").exists()
