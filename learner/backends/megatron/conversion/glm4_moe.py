"""GLM-4.5, GLM-4.5-Air and GLM-4.6, whose heads for several next tokens are kept, and trained if wanted."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    QKV,
    SAME,
    SHARED_LAYER,
    Family,
    Layout,
    Rule,
    Shape,
    layer_rule,
    replaced,
)
from learner.backends.megatron.conversion.qwen2_moe import QWEN_EXPERT
from learner.backends.megatron.conversion.sigmoid_routing import (
    REQUIREMENTS,
    ROUTER,
    SHARED_EXPERT,
    experts_of,
    is_behind,
)


def _rotated_in_halves(heads: Tensor, dimension: int) -> Tensor:
    """View heads of width d, along `dimension`, as [2, 2, d / 4], with their middle quarters exchanged.

    Hugging Face rotates the first half of a head, pairing its quarters 1 and 2, and leaves 3 and 4 as they
    are. With 1, 3, 2, 4 the pairs are the halves of the whole head, as where all of it is rotated; 3 and 4
    are rotated by angles of 0. Queries and keys in the same order have the same products.
    """
    quartered = _cut(heads, dimension, 2, 2)
    return quartered.transpose(dimension, dimension + 1)


def _cut(values: Tensor, dimension: int, *sizes: int) -> Tensor:
    """View a dimension as several of these sizes, and one more of what is left."""
    before, after = values.shape[:dimension], values.shape[dimension + 1 :]
    return values.view(*before, *sizes, values.shape[dimension] // math.prod(sizes), *after)


def _merge_qkv(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    *turned, value = parts
    heads = [_cut(part.contiguous(), 0, len(part) // shape.head_dim) for part in turned]
    turned = [
        _rotated_in_halves(head, 1).reshape(part.shape) for head, part in zip(heads, turned, strict=True)
    ]
    return QKV.merge([*turned, value], shape)


def _split_qkv(whole: Tensor, shape: Shape) -> Sequence[Tensor]:
    query, key, value = QKV.split(whole, shape)
    heads = [_cut(part, 1, part.shape[1] // shape.head_dim) for part in (query, key)]
    return [*(_rotated_in_halves(head, 2) for head in heads), value]


HALF_ROTATED_QKV = replace(QKV, merge=_merge_qkv, split=_split_qkv)
HALF_ROTATED = Layout(
    merge=lambda parts, _: _rotated_in_halves(parts[0], 0).reshape(parts[0].shape),
    split=lambda whole, _: [_rotated_in_halves(whole, 0)],
    part_shapes=SAME.part_shapes,
)
PROJECTIONS = ("q", "k", "v")


def _attention_rules(hf_config: PretrainedConfig) -> tuple[Rule, ...]:
    half = hf_config.rope_parameters.get("partial_rotary_factor", 1.0) == 0.5
    qkv, norm = (HALF_ROTATED_QKV, HALF_ROTATED) if half else (QKV, SAME)
    kinds = ("weight", "bias") if hf_config.attention_bias else ("weight",)
    rules = [
        layer_rule(
            f"self_attention.linear_qkv.{kind}", [f"self_attn.{x}_proj.{kind}" for x in PROJECTIONS], qkv
        )
        for kind in kinds
    ]
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
        beside=partial(is_behind, hf_config.num_hidden_layers, hf_config.num_nextn_predict_layers),
    )
