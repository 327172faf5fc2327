"""DeepSeek-V3 and R1, Kimi-K2, and GLM-4.7-Flash (`glm4_moe_lite`).

Heads for several next tokens are kept, and those of the first three are trained if wanted."""

import math
from functools import partial

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    QKV_WEIGHT,
    SHARED_LAYER,
    Family,
    LatentSizes,
    Rule,
    layer_rule,
)
from learner.backends.megatron.conversion.head_names import BEHIND
from learner.backends.megatron.conversion.qwen2_moe import QWEN_EXPERT
from learner.backends.megatron.conversion.sigmoid_routing import (
    REQUIREMENTS,
    ROUTER,
    SHARED_EXPERT,
    experts_of,
    is_behind,
)


def _attention_rules(queries_are_narrowed: bool) -> tuple[Rule, ...]:
    queries = {"linear_q_proj": "q_proj"}
    if queries_are_narrowed:
        queries = {
            "linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"
        }  # fmt: skip
    names = {
        **queries,
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
    }
    return tuple(
        layer_rule(f"self_attention.{megatron}.weight", [f"self_attn.{name}.weight"])
        for megatron, name in names.items()
    )


def _attention_scale(hf_config: PretrainedConfig) -> float:
    """Return the factor of the scores, which is larger where the context was made longer
    (arXiv:2309.00071, section 3.4)."""
    scale = float((hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim) ** -0.5)
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") == "default" or not rope.get("mscale_all_dim"):
        return scale
    longer = max(1.0, rope["factor"])
    return scale * float(0.1 * rope["mscale_all_dim"] * math.log(longer) + 1.0) ** 2


def deepseek_v3(hf_config: PretrainedConfig) -> Family:
    """Return the family as a configuration has it: with or without a narrow vector for queries."""
    shared_rules = tuple(rule for rule in SHARED_LAYER if rule is not QKV_WEIGHT)
    return Family(
        layer_rules=(*shared_rules, *_attention_rules(hf_config.q_lora_rank is not None)),
        router_rules=(*ROUTER, *SHARED_EXPERT),
        expert_rules=QWEN_EXPERT,
        experts=experts_of,
        latent=LatentSizes(
            query_rank=hf_config.q_lora_rank,
            rank=hf_config.kv_lora_rank,
            plain=hf_config.qk_nope_head_dim,
            rotated=hf_config.qk_rope_head_dim,
            value=hf_config.v_head_dim,
            interleaved=bool(hf_config.rope_interleave),
        ),
        attention_scale=_attention_scale(hf_config),
        requirements=(
            *REQUIREMENTS,
            ("n_shared_experts", lambda count, _: bool(count), "there must be at least 1"),
            ("scoring_func", lambda score, _: score in (None, "sigmoid"), "only sigmoid is supported"),
            ("topk_method", lambda way, _: way in (None, "noaux_tc"), "only noaux_tc is supported"),
            ("moe_layer_freq", lambda step, _: step in (None, 1), "all layers but the first have experts"),
            (
                "num_key_value_heads",
                lambda heads, c: heads == c.num_attention_heads,
                "must be num_attention_heads: each head has keys of its own",
            ),
            (
                "head_dim",
                lambda width, c: width == c.qk_rope_head_dim,
                "must be qk_rope_head_dim, or left out",
            ),
        ),
        head_names=BEHIND,
        beside=partial(
            is_behind, hf_config.num_hidden_layers, getattr(hf_config, "num_nextn_predict_layers", 0)
        ),
    )
