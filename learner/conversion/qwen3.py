from learner.conversion.base import SHARED_LAYER, Family, layer_rule

QWEN3 = Family(
    layer_rules=(
        *SHARED_LAYER,
        layer_rule("self_attention.q_layernorm.weight", ["self_attn.q_norm.weight"]),
        layer_rule("self_attention.k_layernorm.weight", ["self_attn.k_norm.weight"]),
    ),
    qk_norm=True,
)
