"""GLM-4 and GLM-Z1 (`glm4`), dense models: norms before and after attention and MLP, neighbours rotated."""

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import SHARED_LAYER, Family, layer_rule, replaced
from learner.backends.megatron.conversion.glm4_moe import qkv_rules
from learner.backends.megatron.conversion.partial_rotation import rotated_qkv

OUTPUT_NORMS = (
    layer_rule("attention_output_norm.weight", ["post_self_attn_layernorm.weight"]),
    layer_rule("mlp_output_norm.weight", ["post_mlp_layernorm.weight"]),
)


def glm4(hf_config: PretrainedConfig) -> Family:
    """Return the family as a configuration has it: with or without biases of queries, keys and values."""
    neighbours = rotated_qkv(hf_config.head_dim // 2)  # pieces of two, of which each is a pair
    return Family(
        layer_rules=(*replaced(SHARED_LAYER, qkv_rules(hf_config, neighbours)), *OUTPUT_NORMS),
        joined_rows={"mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")},
        qkv_bias=hf_config.attention_bias,
        output_norms=True,
        rotated_parts=(0.5, 1.0),
    )
