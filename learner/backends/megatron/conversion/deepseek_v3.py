"""What mixtures share whose experts are chosen as DeepSeek-V3's are (arXiv:2412.19437, section 2.1.2).

They are chosen by sigmoids and a bias, in groups, beside an expert of all tokens. Heads for several next
tokens have the same names, too."""

import math
import re
from functools import partial

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    BEHIND,
    CHOICE_BIAS,
    QKV_WEIGHT,
    SHARED_LAYER,
    Experts,
    Family,
    LatentSizes,
    Requirement,
    Rule,
    layer_rule,
    shared_expert_rules,
)
from learner.backends.megatron.conversion.qwen2_moe import QWEN_EXPERT, QWEN_ROUTER

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BEST_OF_A_GROUP = 2
"""Experts of a group whose scores together are the group's."""


def experts_of(hf_config: PretrainedConfig) -> Experts:
    """Read the experts from a configuration with DeepSeek's names."""
    return Experts(
        count=hf_config.n_routed_experts,
        per_token=hf_config.num_experts_per_tok,
        intermediate=hf_config.moe_intermediate_size,
        sparse_layers=_sparse_layers(hf_config),
        renormalize=hf_config.norm_topk_prob,
        shared=(hf_config.n_shared_experts or 0) * hf_config.moe_intermediate_size or None,
        shared_gate=False,
        score="sigmoid",
        scale=hf_config.routed_scaling_factor,
        choice_bias=True,
        groups=hf_config.n_group,
        chosen_groups=hf_config.topk_group,
    )


def _sparse_layers(hf_config: PretrainedConfig) -> tuple[bool, ...]:
    """Tell which layers have experts: those that are listed, or all behind the first ones."""
    if kinds := getattr(hf_config, "mlp_layer_types", None):
        return tuple(kind == "sparse" for kind in kinds)
    dense = hf_config.first_k_dense_replace or 0
    return tuple(layer >= dense for layer in range(hf_config.num_hidden_layers))


def _groups_fit(groups: int | None, hf_config: PretrainedConfig) -> bool:
    experts: int = hf_config.n_routed_experts
    if groups is None or groups < 1 or experts % groups:
        return False
    return experts // groups >= _BEST_OF_A_GROUP


def _chosen_groups_fit(chosen: int | None, hf_config: PretrainedConfig) -> bool:
    groups: int = hf_config.n_group
    if not _groups_fit(groups, hf_config):
        return True  # that is told alone
    wanted: int = hf_config.num_experts_per_tok or 0
    of_group: int = hf_config.n_routed_experts // groups
    return chosen is not None and 0 < chosen <= groups and chosen * of_group >= wanted


ROUTER = (*QWEN_ROUTER, layer_rule(CHOICE_BIAS, ["mlp.gate.e_score_correction_bias"]))
SHARED_EXPERT = shared_expert_rules("mlp.shared_experts")
REQUIREMENTS: tuple[Requirement, ...] = (
    ("n_group", _groups_fit, "groups must divide n_routed_experts into two or more"),
    (
        "topk_group",
        _chosen_groups_fit,
        "must be at most n_group, and so many groups must have num_experts_per_tok experts",
    ),
    ("num_experts_per_tok", lambda count, _: count is not None, "must be a number of experts"),
    (
        "first_k_dense_replace",
        lambda count, c: count is not None or bool(getattr(c, "mlp_layer_types", None)),
        "must be a number of layers",
    ),
    ("norm_topk_prob", lambda wanted, _: wanted, "weights of experts must be normalised"),
)


def is_behind(layers: int, heads: int, name: str) -> bool:
    """Tell weights of a head for several next tokens, which files have as layers behind the model's."""
    place = _LAYER.match(name)
    return place is not None and layers <= int(place[1]) < layers + heads


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
