"""GLM-4.5, GLM-4.5-Air and GLM-4.6, whose heads for several next tokens are kept, and trained if wanted."""

from functools import partial

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    BEHIND,
    SHARED_LAYER,
    Family,
    Layout,
    Rule,
    layer_rule,
    replaced,
)
from learner.backends.megatron.conversion.deepseek_v3 import (
    REQUIREMENTS,
    ROUTER,
    SHARED_EXPERT,
    experts_of,
    is_behind,
)
from learner.backends.megatron.conversion.partial_rotation import pieces_of, rotated_norm, rotated_qkv
from learner.backends.megatron.conversion.qwen2_moe import QWEN_EXPERT

PROJECTIONS = ("q", "k", "v")


def qkv_rules(hf_config: PretrainedConfig, layout: Layout) -> list[Rule]:
    """Make the rules of queries, keys and values, with biases where the configuration has them."""
    kinds = ("weight", "bias") if hf_config.attention_bias else ("weight",)
    return [
        layer_rule(
            f"self_attention.linear_qkv.{kind}", [f"self_attn.{x}_proj.{kind}" for x in PROJECTIONS], layout
        )
        for kind in kinds
    ]


def _attention_rules(hf_config: PretrainedConfig) -> tuple[Rule, ...]:
    pieces = pieces_of(hf_config)
    norm = rotated_norm(pieces)
    rules = qkv_rules(hf_config, rotated_qkv(pieces))
    if hf_config.use_qk_norm:
        rules += [
            layer_rule(f"self_attention.{x}_layernorm.weight", [f"self_attn.{x}_norm.weight"], norm)
            for x in ("q", "k")
        ]
    return tuple(rules)


def glm4_moe(hf_config: PretrainedConfig) -> Family:
    """Return the family as a configuration has it: with or without norms of queries and keys, and biases."""
    return Family(
        layer_rules=replaced(SHARED_LAYER, _attention_rules(hf_config)),
        router_rules=(*ROUTER, *(SHARED_EXPERT if hf_config.n_shared_experts else ())),
        expert_rules=QWEN_EXPERT,
        experts=experts_of,
        requirements=REQUIREMENTS,
        qkv_bias=hf_config.attention_bias,
        qk_norm=hf_config.use_qk_norm,
        rotated_parts=(0.5, 1.0),
        rotation=pieces_of(hf_config),
        head_names=BEHIND,
        beside=partial(is_behind, hf_config.num_hidden_layers, hf_config.num_nextn_predict_layers),
    )


OUTPUT_NORMS = (
    layer_rule("attention_output_norm.weight", ["post_self_attn_layernorm.weight"]),
    layer_rule("mlp_output_norm.weight", ["post_mlp_layernorm.weight"]),
)


def glm4(hf_config: PretrainedConfig) -> Family:
    """Return GLM-4 or GLM-Z1 (`glm4`), dense models: norms before and after attention and MLP, neighbours
    rotated, biases of queries, keys and values as the configuration has them."""
    neighbours = rotated_qkv(hf_config.head_dim // 2)  # pieces of two, of which each is a pair
    return Family(
        layer_rules=(*replaced(SHARED_LAYER, qkv_rules(hf_config, neighbours)), *OUTPUT_NORMS),
        joined_rows={"mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")},
        qkv_bias=hf_config.attention_bias,
        output_norms=True,
        rotated_parts=(0.5, 1.0),
    )
