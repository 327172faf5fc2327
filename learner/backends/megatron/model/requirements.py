"""Says which models the learner would compute wrongly, and why."""

from typing import Any

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import SILU, Requirement
from learner.backends.megatron.conversion.families import family_of, shape_of, unknown
from learner.backends.megatron.model.attention.rope import SCALED, rotated_parts
from learner.backends.shared.packed_attention import PACK_DEPENDENT_ROPES
from learner.backends.shared.rope_scaling import rope_types


def unsupported(hf_config: PretrainedConfig) -> list[str]:
    """List, for people, every hyperparameter that the learner would get wrong."""
    if problem := unknown(hf_config):
        return [problem]
    requirements = (*REQUIREMENTS, *family_of(hf_config).requirements)
    return [
        f"{name}={value!r}: {reason}"
        for name, supported, reason in requirements
        for value in _read(hf_config, name)
        if not supported(value, hf_config)
    ]


REQUIREMENTS: list[Requirement] = [
    ("hidden_act", lambda act, c: act == "silu" or family_of(c).gate != SILU, "only silu is supported"),
    (
        "rope_type",
        lambda kind, _: kind not in PACK_DEPENDENT_ROPES,
        "its angles depend on the longest sequence, so that those of a pack would change one another",
    ),
    (
        "rope_type",
        lambda kind, _: kind in {"default", *SCALED, *PACK_DEPENDENT_ROPES},
        f"only default, {', '.join(SCALED)} are supported",
    ),
    (
        "partial_rotary_factor",
        lambda part, c: part in family_of(c).rotated_parts,
        "this part of a head cannot be rotated alone",
    ),
    (
        "partial_rotary_factor",
        lambda part, c: part == 1.0 or rope_types(c) == {"default"},
        "a rotary embedding of a part of the head must not be scaled",
    ),
    (
        "layer_types",
        lambda kinds, c: set(kinds or ()) <= {"full_attention", "sliding_attention"} | _delta_kind(c),
        "only full_attention and sliding_attention are supported",
    ),
    ("attention_bias", lambda bias, c: not bias or family_of(c).qkv_bias, "this bias is not supported"),
    ("mlp_bias", lambda bias, _: not bias, "this bias is not supported"),
    ("attention_dropout", lambda rate, _: not rate, "dropout is not supported: set it to 0"),
    (
        "quantization_config",
        lambda quantized, _: quantized is None,
        "load the unquantized model; fp8 with weight_block_size becomes bfloat16 by launch convert "
        "hf-to-megatron, whose directory --model.path takes; launch convert dequantise reads other kinds",
    ),
    (
        "num_key_value_heads",
        lambda groups, c: c.num_attention_heads % (groups or c.num_attention_heads) == 0,
        "must divide num_attention_heads",
    ),
    (
        "output_router_logits",
        lambda wanted, _: not wanted,
        "it adds a load-balancing loss, which is not trained on: set it to false",
    ),
    (
        "num_experts_per_tok",
        lambda chosen, c: chosen is None or _routable(chosen, c),
        "must be at most num_experts, and more than 1 where norm_topk_prob makes a single weight 1",
    ),
]
"""Requirements of every family."""


def _delta_kind(hf_config: PretrainedConfig) -> set[str]:
    return set() if family_of(hf_config).delta is None else {"linear_attention"}


def _routable(chosen: int, hf_config: PretrainedConfig) -> bool:
    experts = shape_of(hf_config).experts
    return experts is None or (chosen <= experts.count and (chosen > 1 or not experts.renormalize))


def _read(hf_config: PretrainedConfig, name: str) -> list[Any]:
    """Return the values of a setting, of which rotary embeddings may have one for each kind of layers."""
    if name == "rope_type":
        return sorted(rope_types(hf_config))
    if name == "partial_rotary_factor":
        return rotated_parts(hf_config)
    return [getattr(hf_config, name, None)]
