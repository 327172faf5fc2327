"""Quantised weights on their way into SGLang servers, and servers that cannot take them."""

import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from actors.engines.embedded.prepared_weights import without_quantisation
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.weight_labels import weights_label
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.in_server.sluice_changes import APPLY
from actors.engines.sglang.loading import Loading
from actors.engines.sglang.server.settings import interpreter, server_settings
from actors.engines.sglang.weights import HeldWeights
from actors.settings.engines import SglangEngineConfig
from actors.weights.received import torch_tensors
from bus.errors import ConfigError
from learner.host_memory.copies import host_tensors
from storage.weights.quantisation import FORMATS, quantisation_config, with_scales
from storage.weights.quantised_tensors import quantised
from tests.actors.cuda import NEAR, PROMPT, SERVER, policy
from tests.actors.tiny import recomputed, request


def in_fp8(model, name):
    """What the learner would publish of a model, and the configuration that engines are told."""
    state = {key: weight for key, weight in model.state_dict().items() if "rotary" not in key}
    shapes = {key: tuple(weight.shape) for key, weight in state.items()}
    tensors = torch_tensors(quantised(host_tensors(state), FORMATS[name]))
    return tensors, quantisation_config(FORMATS[name], shapes)


FP8 = {"quantization_config": {"quant_method": "fp8"}}


def directory_of(tmp_path, quantisation=None):
    path = tmp_path / "model"
    path.mkdir(exist_ok=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(config | (quantisation or {})))
    return path


class Taking:
    """A server that takes files."""

    def __init__(self):
        self.version = 0
        self.seen = []

    async def weight_version(self):
        return weights_label(self.version)

    async def load_files(self, directory, policy_version, **_):
        self.version = policy_version
        self.seen += [path.name.split("-")[0] for path in sorted(directory.glob("*.safetensors"))]

    async def load_changes(self, file, policy_version, *_, **__):
        self.version = policy_version
        self.seen.append(file.name.split("-")[0])


@pytest.mark.parametrize("quantisation", [{}, FP8])
async def test_quantised_weights_go_whole_into_a_server_that_would_take_changes_of_others(
    tmp_path, quantisation
):
    held = HeldWeights(directory_of(tmp_path, quantisation), tmp_path / "weights")
    server = Taking()
    settings = ({"custom_weight_loader": [APPLY]},)
    facts = ServerFacts("0.5.23", "m", True, True, False, True, 1, settings)
    loading = Loading(held, server, facts)
    weight = torch.arange(5000, dtype=torch.float32)
    changed = weight.clone()
    changed[7] = -1
    codes = {"c": torch.zeros(2, 2).to(torch.float8_e4m3fn)} if quantisation else {}
    for version, state in enumerate(({"a": weight} | codes, {"a": changed})):
        load = await loading.tensors(SglangEngineConfig(), state, version)
        assert await load(False, math.inf) == version
    held.close()
    assert server.seen == ["model", "model" if quantisation else "changes"]


def test_a_server_on_the_cpu_is_refused_before_it_starts(tmp_path):
    config = SglangEngineConfig(server={"device": "cpu"})
    model = directory_of(tmp_path, FP8)
    with pytest.raises(
        ConfigError, match=r"SGLang on the CPU.*learner.publication.quantisation=none"
    ) as told:
        server_settings(config, model, host="::1", port=7, first_gpu=0)
    assert f"weights of {model} as it loads them" in str(told.value)
    assert "a directory that you chose is undone by `launch convert dequantise`" in str(told.value)


def on_a_gpu(monkeypatch, model, capability=(9, 0)):
    """Return what makes the settings of a server for `model` on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    def settings(environment=None, **server):
        given = {"device": "cuda", "dtype": "bfloat16"} | server
        config = SglangEngineConfig(server=given, environment=environment or {})
        return server_settings(config, model, host="::1", port=7, first_gpu=0)

    return settings


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_gpus_without_fp8_are_refused_whatever_kernels_are_chosen(tmp_path, monkeypatch, capability):
    settings = on_a_gpu(monkeypatch, directory_of(tmp_path, FP8), capability)
    below = f"capability {capability[0]}.{capability[1]}, below 8.9, packs the quantised weights of .*none"
    for given in ({}, {"fp8_gemm_backend": "triton", "moe_runner_backend": "triton"}):
        with pytest.raises(ConfigError, match=below):
            settings(**given)
    on_a_gpu(monkeypatch, directory_of(tmp_path), capability)()


def test_servers_that_are_made_to_pack_and_those_on_amds_gpus_are_refused(tmp_path, monkeypatch):
    settings = on_a_gpu(monkeypatch, directory_of(tmp_path, FP8), (8, 9))
    settings({"SGLANG_FORCE_FP8_MARLIN": "0"})
    with pytest.raises(ConfigError, match=r"SGLANG_FORCE_FP8_MARLIN=1: SGLang packs .*: leave it out"):
        settings({"SGLANG_FORCE_FP8_MARLIN": "1"})
    monkeypatch.setenv("SGLANG_FORCE_FP8_MARLIN", "true")
    with pytest.raises(ConfigError, match=r"SGLANG_FORCE_FP8_MARLIN=true: SGLang packs"):
        settings()
    settings({"SGLANG_FORCE_FP8_MARLIN": "0"})
    monkeypatch.delenv("SGLANG_FORCE_FP8_MARLIN")
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(ConfigError, match=r"SGLang on AMD's GPUs packs"):
        settings()


def test_float32_is_refused_for_quantised_weights_with_the_setting_to_change(tmp_path, monkeypatch):
    settings = on_a_gpu(monkeypatch, directory_of(tmp_path, FP8 | {"dtype": "float32"}))
    with pytest.raises(ConfigError, match=r'not in float32: set actors.engine.server.dtype="bfloat16"'):
        settings(dtype="float32")
    assert settings()["dtype"] == "bfloat16"
    without = SglangEngineConfig(server={"device": "cuda"})
    with pytest.raises(ConfigError, match="not in float32"):
        server_settings(without, tmp_path / "model", host="::1", port=7, first_gpu=0)


@pytest.mark.parametrize(("capability", "refused"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_gpus_on_which_scales_would_be_packed_need_other_kernels(tmp_path, monkeypatch, capability, refused):
    settings = on_a_gpu(monkeypatch, directory_of(tmp_path, FP8), capability)
    triton = {"fp8_gemm_backend": "triton", "moe_runner_backend": "triton"}
    assert settings(**triton).items() >= triton.items()
    if not refused:
        settings()
        return
    for name, other in (tuple(triton), tuple(triton)[::-1]):
        with pytest.raises(ConfigError, match=rf'set actors.engine.server.{name}="triton"'):
            settings(**{other: "triton"})


def test_a_running_server_is_refused_for_it_does_not_say_how_it_is_quantised(tmp_path):
    model = directory_of(tmp_path, FP8)
    held = HeldWeights(model, tmp_path / "weights")
    facts = ServerFacts("0.5.23", "m", True, True, False, True, 1, ({},))
    config = SglangEngineConfig(url="http://host:30000")
    with pytest.raises(
        ConfigError, match=rf"{model} for the running server http://host:30000: .* `launch conv"
    ):
        Loading(held, Taking(), facts).check(config)
    held.close()


@pytest.mark.parametrize("quantisation", [{}, FP8])
def test_first_weights_in_another_format_than_the_models_are_refused(tmp_path, quantisation):
    held = HeldWeights(directory_of(tmp_path, quantisation), tmp_path / "weights")
    plain, codes = ({"a": torch.zeros(2, 2, dtype=dtype)} for dtype in (torch.float32, torch.float8_e4m3fn))
    right, wrong, said = (codes, plain, "not in fp8.*is so") if quantisation else (plain, codes, "is not so")
    with pytest.raises(ConfigError, match=f"{said}: .*start this actor again"):
        held.keep(wrong, 0)
    held.keep(right, 0)
    assert held.tensors == right
    held.close()


@pytest.mark.sglang
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "scales"), [("fp8_block", "weight_scale_inv"), ("fp8_tensor", "weight_scale")]
)
def test_sglangs_own_fused_layer_takes_codes_and_scales_by_their_names(tmp_path, name, scales):
    sizes = {"q": 256, "k": 128, "v": 128}
    state = {
        f"model.layers.0.self_attn.{part}_proj.weight": torch.randn(rows, 256) for part, rows in sizes.items()
    }
    shapes = {key: tuple(weight.shape) for key, weight in state.items()}
    config = quantisation_config(FORMATS[name], shapes)
    policy(0, layers=1).config.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(told))
    tensors = torch_tensors(quantised(host_tensors(state), FORMATS[name]))
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    script = Path(__file__).parents[2] / "fp8_layer_in_sglang.py"
    done = subprocess.run(
        [interpreter(SglangEngineConfig()), "-P", script, tmp_path, f"file://{tmp_path}/store"],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["weight True", f"{scales} True"], done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["fp8_block", "fp8_ue8m0"])
async def test_a_server_computes_with_the_codes_and_scales_of_each_version(tmp_path, name):
    """The server quantises activations too, so it is near to the weights without quantisation, not equal."""
    models = [policy(0), policy(1)]
    models[0].config.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": in_fp8(models[0], name)[1]})
    )
    engine = SglangEngine(tmp_path / "model", SglangEngineConfig(server=SERVER), tmp_path / "engine.log")
    try:
        await engine.start()
        before = {}
        for version, model in enumerate(models):
            tensors, _ = in_fp8(model, name)
            changed = {key: t for key, t in tensors.items() if key not in before or not torch.equal(
                t.view(torch.uint8), before[key].view(torch.uint8))}  # fmt: skip
            await engine.load_weights(with_scales(changed, tensors), version)
            before = tensors
            generation = await engine.generate(request(f"v{version}", PROMPT, new=32))
            model.load_state_dict(dict(without_quantisation(tensors)))
            expected = recomputed(model.float(), PROMPT, generation)
            assert np.abs(generation.logprobs - expected).mean() < 2 * NEAR
            assert set(generation.policy_versions.tolist()) == {version}
    finally:
        await engine.close()
