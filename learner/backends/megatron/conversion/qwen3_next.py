"""Qwen3-Next and the language models of Qwen3.5: gated delta nets in most layers, gated attention in others.

Those of Qwen3.5 that see pictures have other model types. Heads for several next tokens (`mtp.`) are kept,
and trained if wanted."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    APART,
    INPUT_NORM,
    MLP_NORM,
    SHARED_LAYER,
    DeltaSizes,
    Experts,
    Family,
    Layout,
    Requirement,
    Rule,
    Shape,
    layer_rule,
    replaced,
)
from learner.backends.megatron.conversion.partial_rotation import PIECES, pieces_of, rotated_norm, rotated_qkv
from learner.backends.megatron.conversion.qwen2_moe import (
    DECODER_SPARSE_STEP,
    QWEN_EXPERT,
    QWEN_ROUTER,
    SHARED_EXPERT,
    experts_beside_shared,
)

Sections = Callable[[DeltaSizes], Sequence[Sequence[int]]]
"""Returns for each Hugging Face tensor the rows of a head of keys in each of its sections, which lie one
after another and have those of all heads each."""


def by_key_head(sections: Sections) -> Layout:
    """Return the layout in which all rows that belong to one head of keys come before those of the next, so
    that tensor-parallel ranks share the heads."""

    def merge(parts: Sequence[Tensor], shape: Shape) -> Tensor:
        sizes = _sizes(shape)
        heads = [
            section.reshape(sizes.key_heads, -1, *part.shape[1:])
            for part, rows in zip(parts, sections(sizes), strict=True)
            for section in torch.split(part, [sizes.key_heads * n for n in rows])
        ]
        return torch.cat(heads, 1).flatten(0, 1)

    def split(whole: Tensor, shape: Shape) -> Sequence[Tensor]:
        rows = sections(_sizes(shape))
        heads = whole.reshape(_sizes(shape).key_heads, -1, *whole.shape[1:])
        found = iter(torch.split(heads, [n for of_part in rows for n in of_part], 1))
        return [torch.cat([next(found).flatten(0, 1) for _ in of_part]) for of_part in rows]

    def part_shapes(whole: tuple[int, ...], shape: Shape) -> Sequence[tuple[int, ...]]:
        sizes = _sizes(shape)
        return [(sizes.key_heads * sum(rows), *whole[1:]) for rows in sections(sizes)]

    return Layout(merge, split, part_shapes, scattered=True)


def _sizes(shape: Shape) -> DeltaSizes:
    assert shape.delta is not None  # rules with this layout are of delta nets
    return shape.delta


def _qkv(sizes: DeltaSizes) -> list[int]:
    return [sizes.key_width, sizes.key_width, sizes.values_of_key_head * sizes.value_width]


def _fused_rows(sizes: DeltaSizes) -> list[list[int]]:
    """Return the rows of `in_proj_qkvz` and of `in_proj_ba`, which files have by heads of keys."""
    values = sizes.values_of_key_head
    return [[sum(_qkv(sizes)) + values * sizes.value_width], [2 * values]]


def _separate_rows(sizes: DeltaSizes) -> list[list[int]]:
    """Return the rows of `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`."""
    values = sizes.values_of_key_head
    return [_qkv(sizes), [values * sizes.value_width], [values], [values]]


def _delta_rules(parts: Sequence[str], sections: Sections) -> tuple[Rule, ...]:
    projections = [f"linear_attn.{part}.weight" for part in parts]
    return (
        INPUT_NORM,
        layer_rule("self_attention.in_proj.weight", projections, by_key_head(sections)),
        layer_rule(
            "self_attention.conv_weight",
            ["linear_attn.conv1d.weight"],
            by_key_head(lambda sizes: [_qkv(sizes)]),
        ),
        layer_rule("self_attention.A_log", ["linear_attn.A_log"]),
        layer_rule("self_attention.dt_bias", ["linear_attn.dt_bias"]),
        layer_rule("self_attention.norm_weight", ["linear_attn.norm.weight"]),
        layer_rule("self_attention.out_proj.weight", ["linear_attn.out_proj.weight"]),
        MLP_NORM,
    )


FUSED = _delta_rules(("in_proj_qkvz", "in_proj_ba"), _fused_rows)
SEPARATE = _delta_rules(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _separate_rows)


def _attention_rules(pieces: int) -> tuple[Rule, ...]:
    projections = [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v")]
    norms = [
        layer_rule(
            f"self_attention.{x}_layernorm.weight", [f"self_attn.{x}_norm.weight"], rotated_norm(pieces)
        )
        for x in ("q", "k")
    ]
    qkv = layer_rule("self_attention.linear_qkv.weight", projections, rotated_qkv(pieces))
    return replaced(SHARED_LAYER, [qkv, *norms])


def _delta_sizes(hf_config: PretrainedConfig) -> DeltaSizes:
    return DeltaSizes(
        layers=tuple(kind == "linear_attention" for kind in hf_config.layer_types),
        key_heads=hf_config.linear_num_key_heads,
        value_heads=hf_config.linear_num_value_heads,
        key_width=hf_config.linear_key_head_dim,
        value_width=hf_config.linear_value_head_dim,
        taps=hf_config.linear_conv_kernel_dim,
    )


DELTA_FROM = 5, 15
"""Release of transformers from which its convolution and delta rule need no kernels of other packages."""


def _has_delta_functions() -> bool:
    major, minor, *_ = transformers.__version__.split(".")
    return (int(major), int(minor)) >= DELTA_FROM


REQUIREMENTS: tuple[Requirement, ...] = (
    (
        "layer_types",
        lambda kinds, _: "linear_attention" not in kinds or _has_delta_functions(),
        "linear attention on Megatron calls functions that transformers has from 5.15 on, and this is "
        f"{transformers.__version__}: upgrade it, or set learner.backend=fsdp",
    ),
    (
        "layer_types",
        lambda kinds, _: "sliding_attention" not in kinds,
        "only full_attention and linear_attention are supported",
    ),
    (
        "linear_num_value_heads",
        lambda heads, c: heads % c.linear_num_key_heads == 0,
        "must be a multiple of linear_num_key_heads",
    ),
    (
        "head_dim",
        lambda width, c: width % (2 * pieces_of(c)) == 0,
        "the part of a head that is rotated must have an even width",
    ),
)
OF_EXPERTS: tuple[Requirement, ...] = (
    ("num_experts", lambda count, _: bool(count), "a model without experts is of the family qwen3_5_text"),
    ("shared_expert_intermediate_size", lambda width, _: bool(width), "there must be a shared expert"),
)


def _family(hf_config: PretrainedConfig, delta_rules: tuple[Rule, ...]) -> Family:
    pieces = pieces_of(hf_config)
    return Family(
        layer_rules=_attention_rules(pieces),
        delta_rules=delta_rules,
        delta=_delta_sizes(hf_config),
        output_gate=True,
        rotation=pieces,
        rotated_parts=tuple(PIECES),
        qk_norm=True,
        centred_norms=True,
        requirements=REQUIREMENTS,
        head_names=APART,
        beside=lambda name: name.startswith("mtp."),
    )


def _with_experts(
    family: Family, experts: Callable[[PretrainedConfig], Experts], *requirements: Requirement
) -> Family:
    return replace(
        family,
        router_rules=(*QWEN_ROUTER, *SHARED_EXPERT),
        expert_rules=QWEN_EXPERT,
        experts=experts,
        requirements=(*family.requirements, *OF_EXPERTS, *requirements),
    )


def _experts_of_all_layers(hf_config: PretrainedConfig) -> Experts:
    return Experts(
        count=hf_config.num_experts,
        per_token=hf_config.num_experts_per_tok,
        intermediate=hf_config.moe_intermediate_size,
        sparse_layers=tuple(repeat(True, hf_config.num_hidden_layers)),
        shared=hf_config.shared_expert_intermediate_size,
    )


def qwen3_next(hf_config: PretrainedConfig) -> Family:
    return _with_experts(_family(hf_config, FUSED), experts_beside_shared, DECODER_SPARSE_STEP)


def qwen3_5(hf_config: PretrainedConfig) -> Family:
    return _family(hf_config, SEPARATE)


def qwen3_5_moe(hf_config: PretrainedConfig) -> Family:
    return _with_experts(_family(hf_config, SEPARATE), _experts_of_all_layers)
