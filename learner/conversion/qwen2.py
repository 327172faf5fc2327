from learner.conversion.base import QKV, SHARED_LAYER, Family, layer_rule

QWEN2 = Family(
    layer_rules=(
        *SHARED_LAYER,
        layer_rule(
            "self_attention.linear_qkv.bias", [f"self_attn.{x}_proj.bias" for x in ("q", "k", "v")], QKV
        ),
    ),
    qkv_bias=True,
)
