"""Tiny random models of families that FSDP trains as transformers computes them, by their names."""

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.learner.tiny import SIZES as MOST_SIZES

SIZES = {**MOST_SIZES, "head_dim": 16}
WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
RECURRENT_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe")
CONV = {"layer_types": ["conv", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama with scaled rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "gemma3": ("Gemma3TextConfig", WINDOWED),
    "gpt_oss": (
        "GptOssConfig",
        {
            **WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "olmo2": ("Olmo2Config", {}),
    "qwen3_next": ("Qwen3NextConfig", {**LINEAR, **SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**LINEAR, **SHARED_EXPERT}),
    "olmo_hybrid": ("OlmoHybridConfig", {**LINEAR, "pad_token_id": 0}),
    "lfm2": ("Lfm2Config", {**CONV, "block_multiple_of": 16}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **CONV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
    ),
}  # fmt: skip


def family_config(name: str, **changes: object) -> PretrainedConfig:
    """A configuration of two layers."""
    kind, own = FAMILIES[name]
    return getattr(transformers, kind)(**{**SIZES, **own, **changes})


def family_model(name: str, **changes: object) -> PreTrainedModel:
    """A random model of transformers itself, whose norms and biases are not trivial."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name, **changes)).eval()
    model.get_input_embeddings().padding_idx = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
