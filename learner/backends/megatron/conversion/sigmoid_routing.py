"""What mixtures share whose experts are chosen as DeepSeek-V3's are (arXiv:2412.19437, section 2.1.2).

They are chosen by sigmoids and a bias, in groups, beside an expert of all tokens. Heads for several next
tokens have the same names, too."""

import re

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    CHOICE_BIAS,
    Experts,
    Requirement,
    layer_rule,
    shared_expert_rules,
)
from learner.backends.megatron.conversion.qwen2_moe import QWEN_ROUTER

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


ROUTER = (
    *QWEN_ROUTER,
    layer_rule(CHOICE_BIAS, ["mlp.gate.e_score_correction_bias"]),
)
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
