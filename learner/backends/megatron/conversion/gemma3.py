"""Gemma 3's language models (`gemma3_text`); models that see pictures have another model type."""

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import QK_NORM, QKV_WEIGHT, Family, Gate, layer_rule

GEMMA_LAYER = (
    layer_rule("input_layernorm.weight", ["input_layernorm.weight"]),
    QKV_WEIGHT,
    *QK_NORM,
    layer_rule("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"]),
    layer_rule("attention_output_norm.weight", ["post_attention_layernorm.weight"]),
    layer_rule("pre_mlp_layernorm.weight", ["pre_feedforward_layernorm.weight"]),
    layer_rule("mlp_output_norm.weight", ["post_feedforward_layernorm.weight"]),
)


def gemma3(hf_config: PretrainedConfig) -> Family:
    return Family(
        layer_rules=GEMMA_LAYER,
        attention_scale=hf_config.query_pre_attn_scalar**-0.5,
        embedding_scale=hf_config.hidden_size**0.5,
        gate=Gate(function="gelu_tanh"),
        qk_norm=True,
        centred_norms=True,
        output_norms=True,
        requirements=(
            (
                "hidden_activation",
                lambda act, _: act == "gelu_pytorch_tanh",
                "only gelu_pytorch_tanh is supported",
            ),
            (
                "use_bidirectional_attention",
                lambda wanted, _: not wanted,
                "a token that sees later ones cannot be predicted by them: set it to false",
            ),
            ("attn_logit_softcapping", lambda bound, _: bound is None, "capped scores are not supported"),
            ("final_logit_softcapping", lambda bound, _: bound is None, "capped logits are not supported"),
        ),
    )
