"""Dense families of other shapes than the sort preset's own, from the embedded engine to the learner."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from tests.e2e.commands import records_of_run
from tests.e2e.small_mixtures import FOUR_STEPS, written

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.nightly]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "gemma with windows": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 3}, query_pre_attn_scalar=16, sliding_window=5,
        sliding_window_pattern=3,
    ),
    "glm4": Glm4Config(**SIZES),
    "llama with scaled rope": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": Qwen2Config(**SIZES),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=5),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_learner_agree_on_a_model_of_the_family(tmp_path: Path, name: str):
    model = written(MODELS[name], tmp_path / "model")
    records = records_of_run(tmp_path, *FOUR_STEPS, "--model.path", str(model))
    assert sum(each.get("train/stage") == "rl" for each in records) == 4
    found = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert found
    assert max(found) < 1e-4


@pytest.mark.parametrize("other_parts", ["left_out", "frozen"])
def test_a_text_model_inside_a_multimodal_one_is_trained_published_and_exported(tmp_path: Path, other_parts):
    vision = {**SIZES, "image_size": 28, "patch_size": 14}
    text = MODELS["gemma with windows"].to_dict()
    whole = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = written(whole, tmp_path / "model", kind=AutoModelForImageTextToText)
    records = records_of_run(
        tmp_path, *FOUR_STEPS, "--model.path", str(model), "--model.other-parts", other_parts
    )
    found = [each["policy/mismatch_nats"] for each in records if "policy/mismatch_nats" in each]
    assert found
    assert max(found) < 1e-4
    export = tmp_path / "runs" / "sort" / "export"
    before, after = (load_file(each / "model.safetensors") for each in (model, export))
    described = json.loads((export / "config.json").read_text())
    if other_parts == "left_out":
        assert described["model_type"] == "gemma3_text"
        assert not any("vision" in name for name in after)
    else:
        assert described["model_type"] == "gemma3"
        assert after.keys() == before.keys()
        assert all(torch.equal(after[n], before[n]) == ("language_model" not in n) for n in after)
