"""Small mixtures of experts, and settings of their runs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory

REPLAY = ("--learner.router-replay", "engine", "--actors.engine.routed-experts")
FOUR_STEPS = (
    "--preset", "sort", "--warmup.steps", "40", "--warmup.batch-size", "16", "--learner.steps", "4",
    "--admission.groups-per-step", "4", "--admission.samples-per-prompt", "4",
    "--evaluation.every-versions", "0", "--learner.target-accuracy", "none",
    "--learner.batch.no-skip-zero-advantages",  # all rewards may be equal: figures are wanted anyway
)  # fmt: skip
SMALL = (*FOUR_STEPS, *REPLAY)


SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


HEADS = {"num_key_value_heads": 2, "head_dim": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 8, "shared_expert_intermediate_size": 48,
}  # fmt: skip


ROUTED = {"n_routed_experts": 8, "num_mtp_layers": 0, "first_k_dense_replace": 1}
MODELS = {
    "glm": Glm4MoeConfig(
        **SIZES, **ROUTED, **HEADS, attention_bias=True, use_qk_norm=True
    ),
    "deepseek": DeepseekV3Config(
        **SIZES, **ROUTED, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, n_group=4, topk_group=2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen3_next": Qwen3NextConfig(**SIZES, **HEADS, **DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **HEADS, **DELTA),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_key_value_heads=2, num_experts=8, shared_expert_intermediate_size=48
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **HEADS, num_experts=8, norm_topk_prob=True),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8),
    "gpt-oss": GptOssConfig(
        **SIZES, **HEADS, num_local_experts=8, sliding_window=6,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip


def written(config: PretrainedConfig, directory: Path, kind: Any = AutoModelForCausalLM) -> Path:
    """A random model, with the tokenizer of the sort preset."""
    tokenizer = build_model_directory(directory, ScratchModel(), seed=0)
    config.get_text_config().vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    kind.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory
