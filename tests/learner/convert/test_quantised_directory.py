"""Model directories in fp8 and back: to the bit, as transformers reads them, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from bus.errors import ConfigError, StorageError
from launch.cli import convert_commands
from learner.convert.quantised_directory import dequantise, quantise
from storage.weights.quantisation import CONVERTIBLE, is_quantised
from tests.learner.fp8_reference import rounded
from tests.learner.tiny import hf_state, tiny_model

pytestmark = pytest.mark.slow

NAMES = [name for name in CONVERTIBLE if name != "int4"]
E4M3, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
UP = "model.layers.0.mlp.up_proj.weight"


def written(path, family="qwen3", dtype=F32, **changes):
    model = tiny_model(family, **changes).to(dtype)
    model.save_pretrained(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def weights(directory):
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def config(directory):
    return json.loads((directory / "config.json").read_text())


def equal_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", F32), ("qwen3_moe", BF16)])
def test_there_and_back_every_weight_is_what_fp8_makes_of_it(tmp_path, name, family, dtype):
    source = written(tmp_path / "hf", family, dtype)
    assert "verified" in str(quantise(source, tmp_path / "fp8", name, shard_bytes=50_000))
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    dequantise(tmp_path / "fp8", tmp_path / "back", F32, shard_bytes=50_000)
    own, codes, back = (weights(tmp_path / path) for path in ("hf", "fp8", "back"))
    index = json.loads((tmp_path / "fp8/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == codes.keys()
    linear = {key for key, weight in own.items() if is_quantised(key, tuple(weight.shape))}
    assert {key for key, tensor in codes.items() if tensor.dtype == E4M3} == linear
    wanted = {key: rounded(weight, name) if key in linear else weight for key, weight in own.items()}
    equal_bits(back, wanted)
    for path in ("fp8", "back"):
        assert (tmp_path / path / "chat_template.jinja").read_text() == "{{ messages }}"
    told = config(tmp_path / "fp8").pop("quantization_config")
    assert told["quant_method"] == ("compressed-tensors" if name == "fp8_channel" else "fp8")
    assert config(tmp_path / "back") == config(source) | {"dtype": "float32"}


def test_a_directory_in_fp8_by_rows_says_so_as_compressed_tensors_does(tmp_path):
    quantise(written(tmp_path / "hf"), tmp_path / "fp8", "fp8_channel")
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    assert config(tmp_path / "fp8")["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": fp8 | {"strategy": "channel", "dynamic": False},
                "input_activations": fp8 | {"strategy": "token", "dynamic": True},
            }
        },
    }
    scales = weights(tmp_path / "fp8")[f"{UP}_scale"]
    assert (scales.dtype, scales.shape) == (F32, (96, 1))


def test_transformers_reads_the_same_weights_of_a_quantised_directory(tmp_path):
    pytest.importorskip("accelerate", reason="transformers needs it to read fp8")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    quantise(written(tmp_path / "hf", "qwen3", BF16, **sizes), tmp_path / "fp8", "fp8_block")
    dequantise(tmp_path / "fp8", tmp_path / "back", BF16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=BF16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    back = weights(tmp_path / "back")
    found = {name: weight for name, weight in hf_state(model).items() if name in back}
    equal_bits(found, back)


def test_powers_of_two_as_scales_survive_bfloat16(tmp_path):
    source = written(tmp_path / "hf", dtype=BF16)
    quantise(source, tmp_path / "fp8", "fp8_ue8m0")
    for dtype, path in ((BF16, "narrow"), (F32, "wide")):
        dequantise(tmp_path / "fp8", tmp_path / path, dtype)
    narrow, wide = weights(tmp_path / "narrow"), weights(tmp_path / "wide")
    assert all(torch.equal(weight.float(), wide[name].float()) for name, weight in narrow.items())


@pytest.mark.parametrize(
    ("size", "scales"),
    [
        ([64, 32], torch.full((2, 2), 0.5, dtype=BF16)),
        ([64, 32], torch.full((2, 2), 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        (None, torch.full((96, 1), 0.5)),
        (None, torch.full((96,), 0.5)),
        (None, torch.full((1,), 0.5)),
        (None, torch.tensor(0.5)),
    ],
)
def test_checkpoints_of_others_are_read_with_their_blocks_and_scales(tmp_path, size, scales):
    codes = torch.randn(96, 64).to(E4M3)
    suffix = "_scale" if size is None else "_scale_inv"
    tensors = {UP: codes, UP + suffix: scales, "model.layers.0.mlp.up_proj.input_scale": torch.tensor(1.0)}
    directory = stored(tmp_path / "fp8", tensors, weight_block_size=size)
    dequantise(directory, tmp_path / "back", F32)
    equal_bits(weights(tmp_path / "back"), {UP: codes.float() * 0.5})


def stored(path, tensors, **quantisation):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"} | quantisation}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path):
    codes, scales = torch.ones(96, 64).to(E4M3), torch.ones(1, 1)
    nan = torch.full((96, 64), torch.nan).to(E4M3)
    for number, (quantisation, tensors, error, why) in enumerate([
        ({"quant_method": "awq"}, {UP: scales}, ConfigError, "by 'awq' in.*: 'fp8', 'mxfp4' and"),
        ({}, {UP: codes}, ConfigError, f"{UP} is in fp8.*has no scales"),
        ({}, {UP: nan, f"{UP}_scale": scales}, StorageError, f"{UP} has values that are not finite"),
        (
            {"weight_block_size": [32, 32]}, {UP: codes, f"{UP}_scale_inv": torch.ones(2, 2)}, ConfigError,
            rf"{UP}_scale_inv must be \[3, 2\], and is \[2, 2\]",
        ),
        ({}, {UP: codes[0].clone(), f"{UP}_scale": scales}, ConfigError, r"shape \[64\], and is no matrix"),
        ({}, {UP: codes.float(), f"{UP}_scale": scales}, ConfigError, f"of {UP}, which is torch.float32"),
        ({}, {f"{UP}_scale": scales}, ConfigError, f"scales of {UP}, which is missing"),
        *(
            ({"weight_block_size": size}, {UP: codes}, ConfigError, "weight_block_size=.* is no pair")
            for size in ("128", 128, [1, 2, 3], [0, 16], [])
        ),
        (
            {"weight_block_size": [32, 32]}, {UP: codes, f"{UP}_scale_inv": torch.ones(1, 1)}, ConfigError,
            rf"{UP}_scale_inv must be \[3, 2\], and is \[1, 1\]",
        ),
        (
            {"weight_block_size": [32, 32]}, {UP: codes, f"{UP}_scale_inv": torch.tensor(1.0)}, ConfigError,
            rf"{UP}_scale_inv must be \[3, 2\], and is \[\]",
        ),
    ]):  # fmt: skip
        directory = stored(tmp_path / f"fp8-{number}", tensors, **quantisation)
        with pytest.raises(error, match=why):
            dequantise(directory, tmp_path / "back", F32)
        assert not (tmp_path / "back").exists()
    with pytest.raises(ConfigError, match="is quantised already"):
        quantise(directory, tmp_path / "again", "fp8_block")


def test_a_weight_that_is_not_finite_is_refused_by_name_and_leaves_nothing(tmp_path):
    source = written(tmp_path / "hf")
    state = weights(source)
    state[UP][3, 3] = torch.inf
    save_file(state, source / "model.safetensors")
    with pytest.raises(StorageError, match=f"{UP} has values that are not finite"):
        quantise(source, tmp_path / "fp8", "fp8_tensor")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_the_commands_say_what_they_wrote(tmp_path, capsys):
    convert_commands.quantise(written(tmp_path / "hf"), tmp_path / "fp8", to="fp8_ue8m0")
    convert_commands.dequantise(tmp_path / "fp8", tmp_path / "back")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"wrote {tmp_path / 'fp8'}: ")
    assert second.startswith(f"wrote {tmp_path / 'back'}: ")
    assert config(tmp_path / "fp8")["quantization_config"]["scale_fmt"] == "ue8m0"
    assert weights(tmp_path / "back")[UP].dtype == BF16
