"""SGLang's own models, of each family whose changes are sent alone, take them as they take all weights."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.engines.sglang.changes import changes
from actors.engines.sglang.client.tensor_files import write_tensors
from actors.engines.sglang.in_server import sluice_changes
from actors.engines.sglang.server.settings import interpreter
from actors.settings.engines import SglangEngineConfig
from learner.model_directories.model_directory import save_hf_directory
from storage.model_files.families import families_with
from tests.actors.sglang_stand_in import later
from tests.learner.tiny import FAMILIES, hf_state, tiny_model

LATENT = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
AS_PUBLISHED = {
    "deepseek_v3": {**LATENT, "rope_scaling": YARN},
    "glm4_moe_lite": {**LATENT, "first_k_dense_replace": 1, "rope_scaling": None},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    **{name: {"full_attention_interval": 2} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}  # fmt: skip
"""What SGLang reads of published configurations, and transformers does not write."""
WITHOUT_CACHE = {"attention_backend": "torch_native", "disable_radix_cache": True}
SETTINGS = {"gpt_oss": {"attention_backend": "triton"}}
WRITTEN_WITHOUT_THE_MODEL = {
    "glm4", "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
}  # fmt: skip
"""Families of which SGLang does nothing but copy what it loads."""
NOT_TINY = {"qwen3_vl"}  # its changes are tried on a GPU


def save_directory(directory: Path, family: str) -> None:
    """Write a model, what it is two versions later, and what changed in each."""
    model = tiny_model(family)
    first = {name: tensor.bfloat16().contiguous() for name, tensor in hf_state(model).items()}
    save_hf_directory(directory, model.config, first, None)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16", **AS_PUBLISHED.get(family, {})}
    (directory / "config.json").write_text(json.dumps(config))
    second = later(first, 0.05)
    third = later(second, 0.05)
    save_file(third, directory / "later")
    for name, old, new in (("changes", first, second), ("changes-2", second, third)):
        found = changes(old, new)
        assert found is not None
        write_tensors(directory / name, found.tensors, found.metadata)


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_models_of_sglang_take_changes_as_they_take_all_weights(tmp_path):
    families = set(families_with(lambda family: family.sglang_copies != "no"))
    assert set(FAMILIES) <= families
    torch.manual_seed(0)
    settings = {name: SETTINGS.get(name, WITHOUT_CACHE) for name in sorted(families - NOT_TINY)}
    for name in settings:
        save_directory(tmp_path / name, name)
    stub = tmp_path / "vllm/_custom_ops.py"  # rotary embeddings want it where SGLang's kernels are not
    stub.parent.mkdir()
    stub.write_text("rotary_embedding = None")
    loader = Path(sluice_changes.__file__).parent
    command = [
        interpreter(SglangEngineConfig()), "-P", Path(__file__).parents[2] / "changes_in_sglang.py", tmp_path,
        json.dumps(settings),
    ]  # fmt: skip
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{loader}:{tmp_path}"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {row.pop("family"): row for row in map(json.loads, ended.stdout.splitlines())}
    assert found.keys() == settings.keys()
    for name, row in found.items():
        assert set(row["differ"]) <= {"lm_head.weight"}, name  # Gemma's output layer is as memory had it
        assert len(row["changed"]) > 10, name
        if name in WRITTEN_WITHOUT_THE_MODEL:
            assert row["by_model"] == [], name
