"""Model directories in int4 and back, against layouts and roundings worked by hand."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.weights.received import torch_tensors
from bus.errors import ConfigError, StorageError
from learner.backends.model_loading import load_hf_directory
from learner.convert.megatron import hf_to_megatron
from learner.convert.quantised_directory import dequantise, quantise
from learner.host_memory.copies import host_tensors
from storage.weights import int4
from storage.weights.quantisation import FORMATS
from storage.weights.quantised_tensors import quantised
from tests.learner.tiny import hf_state, tiny_model

UP = "model.layers.0.mlp.up_proj.weight"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
F32, BF16 = torch.float32, torch.bfloat16


def packed(name, weight):
    """The three tensors of a weight, as they are published and stored."""
    return torch_tensors(quantised(host_tensors({name: weight}), FORMATS["int4"]))


def unpacked(words, scales, columns):
    return torch.from_numpy(int4.unpacked(words.numpy().view(np.uint32), scales.float().numpy(), columns))


def weights(directory):
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def test_eight_columns_lie_in_a_word_from_its_lowest_bits_on():
    row = torch.zeros(1, 128)
    row[0, :8] = torch.tensor([-7.5, -7, -1, 0, 1, 2, 6.4, 7])
    found = packed(UP, row)
    assert found[f"{UP}_scale"].tolist() == [[1]]
    assert found[f"{UP}_shape"].tolist() == [1, 128]
    # -7.5 is a tie and becomes the even -8
    nibbles = [0, 1, 7, 8, 9, 10, 14, 15]
    word = sum(nibble << 4 * place for place, nibble in enumerate(nibbles))
    assert found[f"{UP}_packed"][0, 0].item() == word - 2**32
    assert set(found[f"{UP}_packed"][0, 1:].tolist()) == {0x88888888 - 2**32}
    values = unpacked(found[f"{UP}_packed"], found[f"{UP}_scale"], 128)
    assert values[0, :8].tolist() == [-8, -7, -1, 0, 1, 2, 6, 7]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_element_is_the_nearest_that_its_group_can_have(dtype):
    torch.manual_seed(0)
    weight = (torch.randn(33, 384) * torch.randn(33, 384).exp()).to(dtype)
    weight[3, 128:256] = 0
    found = packed(UP, weight)
    scales = found[f"{UP}_scale"]
    wanted = (weight.float().reshape(33, 3, 128).abs().amax(-1) / 7.5).to(dtype)
    wanted[3, 1] = 1
    assert scales.dtype == dtype
    assert torch.equal(scales, wanted)
    values = unpacked(found[f"{UP}_packed"], scales, 384).double()
    steps = scales.double().repeat_interleave(128, 1)
    levels = torch.arange(-8, 8, dtype=torch.float64) * steps[..., None]
    best = (levels - weight.double()[..., None]).abs().amin(-1)
    assert torch.all((values - weight.double()).abs() <= best + 1e-6 * steps)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_there_and_back_linear_layers_are_rounded_and_others_stay(tmp_path, dtype):
    tiny_model("qwen3", **SIZES).to(dtype).save_pretrained(tmp_path / "hf")
    quantise(tmp_path / "hf", tmp_path / "int4", "int4", shard_bytes=100_000)
    dequantise(tmp_path / "int4", tmp_path / "back", F32)
    own, codes, back = (weights(tmp_path / path) for path in ("hf", "int4", "back"))
    assert own.keys() == back.keys()
    for name, weight in own.items():
        if f"{name}_packed" in codes:
            three = packed(name, weight)
            assert torch.equal(back[name], unpacked(*list(three.values())[:2], weight.shape[1]))
        else:
            assert torch.equal(back[name], weight)
    assert f"{UP}_packed" in codes
    assert len(codes) == len(own) + 2 * 14
    config = json.loads((tmp_path / "int4/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["ignore"] == ["lm_head"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 128


KIMIS = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
    "config_groups": {"group_0": {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
            "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
            "type": "int",
        },
    }},
}  # fmt: skip


def test_kimis_experts_in_int4_become_a_directory_that_a_run_begins_with(tmp_path):
    """Kimi-K2-Thinking has routed experts alone in int4, in groups of 32 columns."""
    model = tiny_model("deepseek_v3", moe_intermediate_size=32).bfloat16()
    state, generator = hf_state(model), torch.Generator().manual_seed(0)
    wanted = dict(state)
    for name in [name for name in state if ".experts." in name]:
        rows, columns = state.pop(name).shape
        codes = torch.randint(16, (rows, columns // 8, 8), generator=generator)
        scales = torch.rand(rows, columns // 32, generator=generator).bfloat16()
        words = (codes << torch.arange(0, 32, 4)).sum(-1)
        state[f"{name}_packed"] = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
        state[f"{name}_scale"] = scales
        state[f"{name}_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
        values = (codes.flatten(1) - 8).float() * scales.float().repeat_interleave(32, 1)
        wanted[name] = values.bfloat16()
    (tmp_path / "kimi").mkdir()
    save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / "kimi/model.safetensors")
    config = model.config.to_dict() | {"model_type": "kimi_k2", "quantization_config": KIMIS}
    (tmp_path / "kimi/config.json").write_text(json.dumps(config))
    dequantise(tmp_path / "kimi", tmp_path / "bfloat16", BF16)
    hf_to_megatron(tmp_path / "bfloat16", tmp_path / "megatron")
    found_config, found = load_hf_directory(tmp_path / "megatron")
    assert found_config.model_type == "deepseek_v3"
    assert getattr(found_config, "quantization_config", None) is None
    assert {*found} == {*wanted}
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "narrow")
    with pytest.raises(
        ConfigError, match=r"down_proj.weight has 96 columns, and int4 has a scale for each 128"
    ):
        quantise(tmp_path / "narrow", tmp_path / "int4", "int4")
    tiny_model("qwen3", **SIZES).save_pretrained(tmp_path / "hf")
    state = weights(tmp_path / "hf")
    state[UP][0, 0] = torch.nan
    save_file(state, tmp_path / "hf/model.safetensors")
    with pytest.raises(StorageError, match=f"{UP} has values that are not finite"):
        quantise(tmp_path / "hf", tmp_path / "int4", "int4")
    state[UP][0, 0] = 0
    save_file(state, tmp_path / "hf/model.safetensors")
    quantise(tmp_path / "hf", tmp_path / "int4", "int4")
    file = tmp_path / "int4/config.json"
    config = json.loads(file.read_text())
    for key, value, why in (
        ("group_size", 32, r"_scale must be \[\d+, \d+\] for"),
        ("num_bits", 8, "in another way"),
        ("actorder", "group", r"in their order \(no actorder\)"),
    ):
        scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        file.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | {
            "config_groups": {"group_0": {"weights": scheme | {key: value}}}}}))  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            dequantise(tmp_path / "int4", tmp_path / "back", F32)
    file.write_text(json.dumps(config))
    codes = weights(tmp_path / "int4") | {f"{UP}_g_idx": torch.zeros(128, dtype=torch.int32)}
    save_file(codes, tmp_path / "int4/model.safetensors")
    with pytest.raises(ConfigError, match=f"{UP}_g_idx puts columns into groups in another order"):
        dequantise(tmp_path / "int4", tmp_path / "back", F32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "int4", "narrow"]
