"""MiniMax-M2: experts chosen by sigmoids and a bias, and norms of all queries or keys of a token together."""

from dataclasses import replace

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    CHOICE_BIAS,
    SHARED_LAYER,
    Experts,
    Family,
    layer_rule,
    replaced,
)
from learner.backends.megatron.conversion.glm4_moe import PROJECTIONS
from learner.backends.megatron.conversion.mixtral import MIXTRAL, local_experts
from learner.backends.megatron.conversion.partial_rotation import (
    pieces_of,
    rotated_joint_norm,
    rotated_qkv,
)


def _experts(hf_config: PretrainedConfig) -> Experts:
    return replace(local_experts(hf_config), score="sigmoid", choice_bias=True)


def minimax_m2(hf_config: PretrainedConfig) -> Family:
    """Return the family as a configuration has it: so much of each head is rotated."""
    pieces = pieces_of(hf_config)
    projections = [f"self_attn.{x}_proj.weight" for x in PROJECTIONS]
    attention = [layer_rule("self_attention.linear_qkv.weight", projections, rotated_qkv(pieces))]
    attention += [
        layer_rule(
            f"self_attention.{x}_layernorm.weight", [f"self_attn.{x}_norm.weight"], rotated_joint_norm(pieces)
        )
        for x in ("q", "k")
    ]
    bias = layer_rule(CHOICE_BIAS, ["block_sparse_moe.e_score_correction_bias"])
    return Family(
        layer_rules=replaced(SHARED_LAYER, attention),
        router_rules=(*MIXTRAL.router_rules, bias),
        expert_rules=MIXTRAL.expert_rules,
        experts=_experts,
        requirements=MIXTRAL.requirements,
        qk_norm=True,
        joint_norms=True,
        rotated_parts=(0.5, 1.0),
        rotation=pieces,
    )
