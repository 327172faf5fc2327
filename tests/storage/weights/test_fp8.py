"""The arithmetic of fp8 against float64 and against torch's own, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from bus.errors import ConfigError, StorageError
from storage.weights import fp8, int4, quantised_tensors
from storage.weights.fp8 import VALUES, Blocks, codes_of, dequantised, scales_of
from storage.weights.quantisation import BLOCKS, FORMATS, is_quantised, quantisation_config, with_scales
from storage.weights.quantised_tensors import quantised
from storage.weights.tensors import HostTensor, widened

pytestmark = pytest.mark.slow

BLOCK, UE8M0, TENSOR = (FORMATS[name] for name in ("fp8_block", "fp8_ue8m0", "fp8_tensor"))
NAME = "model.layers.0.mlp.up_proj.weight"
E4M3 = torch.float8_e4m3fn


def host(values, dtype="F32"):
    """The values as words of a dtype."""
    values = np.asarray(values, np.float32)
    words = values.reshape(-1).view(np.uint32)
    if dtype == "BF16":
        words = (words >> 16).astype(np.uint16)
    return HostTensor(dtype, values.shape, words)


def matrix(rows, columns, seed=0):
    """Values over many magnitudes, with zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, columns)) * np.exp(rng.normal(size=(rows, columns)) * 4)
    values[rng.random(values.shape) < 0.01] = -0.0
    return values.astype(np.float32)


def undone(found, name=NAME):
    """Codes, scales and the float64 product that an engine would compute with, of one weight."""
    codes = found[name].words.reshape(found[name].shape)
    [scale] = [tensor for other, tensor in found.items() if other.startswith(f"{name}_scale")]
    scales = scale.words.view(np.float32).reshape(scale.shape)
    rows, columns = (np.arange(size) // 128 for size in codes.shape)
    by_element = scales if scales.ndim == 0 else scales[np.ix_(rows, columns)]
    return codes, scales, by_element.astype(np.float64)


def test_every_code_has_the_value_that_torch_gives_it():
    of_torch = torch.arange(256, dtype=torch.uint8).view(E4M3).float().numpy()
    assert np.array_equal(
        VALUES.view(np.uint32)[VALUES == VALUES], of_torch.view(np.uint32)[VALUES == VALUES]
    )
    assert np.flatnonzero(np.isnan(VALUES)).tolist() == [0x7F, 0xFF]


def test_each_value_becomes_the_nearest_code_and_ties_become_even():
    finite = np.sort(VALUES[:127]).astype(np.float64)
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)  # exact in float32
    near = np.concatenate([middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
    values = np.concatenate(
        [near, finite.astype(np.float32), matrix(300, 300).reshape(-1), [1e-45, 449, 3e38]]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    distance = np.abs(np.abs(values[:, None]).astype(np.float64).clip(max=448) - finite)
    nearest = distance.argmin(axis=1)
    tied = distance[np.arange(len(values)), np.minimum(nearest + 1, 126)] == distance.min(axis=1)
    nearest += tied & (nearest % 2 == 1) & (nearest < 126)
    wanted = nearest + 128 * np.signbit(values)
    assert np.array_equal(codes_of(values), wanted)
    assert tied.sum() > 250


def test_it_rounds_to_the_bit_as_torch_does():
    patterns = (np.arange(2**32 // 4097, dtype=np.uint64) * 4097).astype(np.uint32).view(np.float32)
    values = patterns[np.isfinite(patterns)]
    of_torch = torch.from_numpy(values).clamp(-448, 448).to(E4M3).view(torch.uint8).numpy()
    assert np.array_equal(codes_of(values), of_torch)


def test_scales_are_those_computed_by_hand():
    largest = np.float32([448, 896, 3.5, 449, 0, 1e-45])
    plain = scales_of(largest, powers_of_two=False)
    assert plain.tolist() == [1, 2, 0.0078125, np.float32(449 / 448), 1, 2.0**-126]
    powers = scales_of(largest, powers_of_two=True)
    assert powers.tolist() == [1, 2, 0.0078125, 2, 1, 2.0**-126]


@pytest.mark.parametrize("found", [BLOCK, UE8M0, TENSOR])
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 64)])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_every_element_is_the_nearest_that_its_block_can_have(found, shape, dtype):
    source = host(matrix(*shape), dtype)
    values = widened(source.words, dtype).reshape(shape).astype(np.float64)
    codes, scales, by_element = undone(quantised({NAME: source}, found))
    finite = np.sort(VALUES[~np.isnan(VALUES)]).astype(np.float64)
    exact = values / by_element
    right = np.clip(np.searchsorted(finite, exact), 1, len(finite) - 1)
    best = np.minimum(np.abs(finite[right] - exact), np.abs(finite[right - 1] - exact))
    assert np.all(np.abs(VALUES[codes] - exact) <= best + 1e-6 * np.abs(exact))  # the quotient is a float32
    if found is not TENSOR:
        assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
        for row, column in np.ndindex(scales.shape):
            block = values[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            wanted = np.abs(block).max() / 448
            if found is UE8M0:
                wanted = 2.0 ** np.ceil(np.log2(wanted))
            assert scales[row, column] == np.float32(wanted)
    else:
        assert scales == np.float32(np.abs(values).max() / 448)
    assert np.array_equal(dequantised(codes, scales, BLOCKS), VALUES[codes] * by_element.astype(np.float32))


@pytest.mark.parametrize("found", [BLOCK, UE8M0, TENSOR])
def test_values_that_were_quantised_stay_when_they_are_quantised_again(found):
    codes, scales, _ = undone(quantised({NAME: host(matrix(300, 300))}, found))
    once = dequantised(codes, scales, BLOCKS)
    again, other_scales, _ = undone(quantised({NAME: host(once)}, found))
    if found is not UE8M0:
        assert np.array_equal(again, codes)
    rtol = 0 if found is UE8M0 else 1.2e-7  # a scale that is no power of two is rounded anew
    np.testing.assert_allclose(dequantised(again, other_scales, BLOCKS), once, rtol=rtol)


def test_threads_do_not_change_a_bit():
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": host(matrix(300, 200, seed=n)) for n in range(3)}
    alone = quantised(tensors, TENSOR)
    with ThreadPoolExecutor(3) as threads:
        together = quantised(tensors, TENSOR, threads)
    assert list(alone) == list(together)
    assert all(np.array_equal(alone[name].words, together[name].words) for name in alone)


class Counting(ThreadPoolExecutor):
    """Threads that count what they are asked to do."""

    asked = 0

    def submit(self, *args, **settings):
        self.asked += 1
        return super().submit(*args, **settings)


@pytest.mark.parametrize(("elements", "asked"), [(1 << 23, 2), (1, 2 * 3 * 4), (2 * 128 * 300, 2 * 6)])
def test_threads_take_as_many_rows_of_blocks_at_a_time_as_make_it_worth_it(monkeypatch, elements, asked):
    monkeypatch.setattr(quantised_tensors, "TASK_ELEMENTS", elements)
    names = [NAME.replace("0", str(number)) for number in range(4)]
    tensors = {name: host(matrix(300, 300, seed)) for seed, name in enumerate(names)}
    with Counting(3) as threads:
        found = quantised(tensors, BLOCK, threads)
    assert threads.asked == asked
    for name, tensor in tensors.items():
        alone = quantised({name: tensor}, BLOCK)
        assert all(np.array_equal(found[key].words, alone[key].words) for key in alone)


def test_blocks_of_zeros_stay_zeros_with_their_signs():
    values = np.zeros((128, 256), np.float32)
    values[:, 128:] = -0.0
    codes, scales, _ = undone(quantised({NAME: host(values)}, BLOCK))
    assert scales.tolist() == [[1, 1]]
    assert np.unique(codes[:, :128]).tolist() == [0]
    assert np.unique(codes[:, 128:]).tolist() == [0x80]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_not_finite_is_refused_by_name_and_place(value):
    values = matrix(300, 300)
    values[140, 299] = value
    with pytest.raises(StorageError, match=rf"{NAME} has values that are not finite.*row 128, column 256"):
        quantised({NAME: host(values)}, BLOCK)


def test_scales_that_do_not_fit_their_weight_are_refused():
    with pytest.raises(
        StorageError, match=r"\[2, 2\] do not fit a weight of \[130, 128\].*it needs \[2, 1\]"
    ):
        dequantised(np.zeros((130, 128), np.uint8), np.ones((2, 2), np.float32), Blocks(128, 128))


def test_linear_layers_are_quantised_and_the_others_are_not():
    layers = [
        "self_attn.q_proj", "self_attn.o_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
        "mlp.gate_proj", "mlp.experts.7.down_proj", "mlp.shared_expert.up_proj",
        "block_sparse_moe.experts.3.w2", "linear_attn.in_proj_qkvz", "self_attn.indexer.wq_b",
    ]  # fmt: skip
    kept = ["mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate", "self_attn.indexer.weights_proj"]
    of_layer = "model.layers.0.{}.weight".format
    assert all(is_quantised(of_layer(name), (8, 8)) for name in layers)
    assert not any(is_quantised(of_layer(name), (8, 8)) for name in kept)
    others = ["lm_head.weight", "model.embed_tokens.weight", "model.visual.blocks.0.mlp.up_proj.weight"]
    others.append("thinker.audio_tower.layers.0.self_attn.q_proj.weight")
    assert not any(is_quantised(name, (8, 8)) for name in others)
    assert not is_quantised("model.layers.0.self_attn.q_proj.bias", (8,))
    assert not is_quantised("model.layers.0.conv.in_proj.weight", (8, 8, 4))


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 4, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "word_embed_proj_dim": 32, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        "Bloom", "Falcon", "OPT", "Phi3", "Qwen3", "RecurrentGemma",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "CodeGen", "GPTBigCode", "GPTJ", "GPTNeoX", "Mpt", "Persimmon", "Phi", "Starcoder2", "XGLM"
            )
        ),
    ],
)  # fmt: skip
def test_a_model_is_quantised_whole(family):
    config = getattr(transformers, f"{family}Config")(**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(linear) > 2
    quantisation_config(
        FORMATS["fp8_block"], {name: tuple(one.shape) for name, one in model.named_parameters()}
    )
    kept = {
        name for name, one in linear.items() if not is_quantised(f"{name}.weight", tuple(one.weight.shape))
    }
    assert kept <= {"lm_head", "embed_out"}


def test_the_config_names_the_format_and_every_layer_that_stays():
    shapes = {
        "model.embed_tokens.weight": (9, 8), "model.layers.0.mlp.gate.weight": (4, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8), "model.norm.weight": (8,),
    }  # fmt: skip
    kept = ["lm_head", "model.layers.0.mlp.gate"]
    common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    by_block = common | {"weight_block_size": [128, 128], "modules_to_not_convert": kept}
    assert quantisation_config(BLOCK, shapes) == by_block
    assert quantisation_config(UE8M0, shapes) == by_block | {"scale_fmt": "ue8m0"}
    assert quantisation_config(TENSOR, shapes) == common | {"modules_to_not_convert": kept}


@pytest.mark.parametrize("name", FORMATS)
def test_what_cannot_be_quantised_is_refused(name):
    with pytest.raises(ConfigError, match=rf"gate_up_proj holds 8 experts in one tensor, and {name} is for"):
        quantisation_config(FORMATS[name], {"model.layers.0.mlp.experts.gate_up_proj": (8, 4, 4)})
    gpt_2 = {"transformer.h.0.attn.c_attn.weight": (8, 24)}
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.c_attn\.weight is GPT-2's, .* cannot be quantised"):
        quantisation_config(FORMATS[name], gpt_2)
    other = {"layers.0.mixer.mixing.weight": (512, 128)}
    with pytest.raises(ConfigError, match=rf"{name} is for .* has none, but layers\.0.*: it cannot be quant"):
        quantisation_config(FORMATS[name], other)
    narrow = {"layers.0.up_proj.weight": (128, 96)}
    if name == "int4":
        with pytest.raises(ConfigError, match=r"up_proj.weight has 96 columns, .* each 128 .*fp8_block"):
            quantisation_config(FORMATS[name], narrow)
    else:
        quantisation_config(FORMATS[name], narrow)


def test_a_weight_and_its_scales_go_together_whichever_changed():
    every = {"a.weight": 1, "a.weight_scale_inv": 2, "b.weight": 3, "b.weight_scale": 4, "norm": 5}
    assert with_scales({"a.weight": 1, "norm": 5}, every).keys() == {"a.weight", "a.weight_scale_inv", "norm"}
    assert with_scales({"b.weight_scale": 4}, every).keys() == {"b.weight", "b.weight_scale"}


@pytest.mark.parametrize("blocks", [BLOCKS, Blocks(1, 300)])
def test_threads_change_no_bit_of_what_is_dequantised(monkeypatch, blocks):
    monkeypatch.setattr(fp8, "TASK_ELEMENTS", 1000)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 127, (1000, 300)).astype(np.uint8)
    scales = rng.random(blocks.counts(codes.shape)).astype(np.float32)
    with ThreadPoolExecutor(3) as threads:
        shared = dequantised(codes, scales, blocks, threads)
    assert (shared == dequantised(codes, scales, blocks)).all()
    packed = codes.astype(np.uint32)
    columns, groups = 300 * int4.PACKED_COLUMNS, rng.random((1000, 24)).astype(np.float32)
    monkeypatch.setattr(int4, "TASK_ELEMENTS", 10_000)
    with ThreadPoolExecutor(3) as threads:
        shared = int4.unpacked(packed, groups, columns, threads)
    assert (shared == int4.unpacked(packed, groups, columns)).all()
    assert shared.shape == (1000, columns)
