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
