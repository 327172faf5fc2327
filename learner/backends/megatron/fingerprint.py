"""The hyperparameters of a model that decide which weights fit it, and what is computed with them."""

import json
from collections.abc import Mapping
from dataclasses import fields

from pydantic import JsonValue
from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import Experts
from learner.backends.megatron.conversion.families import shape_of
from learner.backends.megatron.model.attention.rope import rope_settings
from learner.backends.megatron.model.attention.windows import windows_of
from learner.model_directories.checkpoint_manifest import differences

ARITHMETIC = ("rms_norm_eps", "swiglu_alpha", "swiglu_limit")
"""Hyperparameters that change no shape, but what is computed. Manifests did not always say them."""


def fingerprint(hf_config: PretrainedConfig) -> dict[str, JsonValue]:
    """Return all hyperparameters that decide which weights fit, as they read back from JSON."""
    shape = vars(shape_of(hf_config)).copy()
    experts, latent, delta = (shape.pop(name) for name in ("experts", "latent", "delta"))
    output = {"scores": True} if shape.pop("scores") else {}
    routing = {} if experts is None else {"experts": _of_experts(experts)}
    attention: dict[str, JsonValue] = {} if latent is None else {"latent": vars(latent)}
    if delta is not None:
        attention["delta"] = json.loads(json.dumps(vars(delta)))
    windows = windows_of(hf_config)
    sight = {"windows": list[JsonValue](windows)} if any(windows) else {}
    if (scalar := getattr(hf_config, "query_pre_attn_scalar", None)) is not None:
        sight["query_pre_attn_scalar"] = scalar
    arithmetic = {name: getattr(hf_config, name) for name in ARITHMETIC if hasattr(hf_config, name)}
    return {
        "model_type": hf_config.model_type,
        **rope_settings(hf_config), **shape, **routing, **attention, **sight, **arithmetic, **output,
    }  # fmt: skip


def differences_from(saved: Mapping[str, JsonValue], hf_config: PretrainedConfig) -> list[str]:
    """List, for people, by what weights that `saved` describes do not fit a model of `hf_config`."""
    ours = fingerprint(hf_config)
    return differences(saved, {name: ours[name] for name in ours if name in saved or name not in ARITHMETIC})


def _of_experts(experts: Experts) -> JsonValue:
    """Return what is known of experts: checkpoints speak of nothing that came to `Experts` later and that a
    model has as all models had it before."""
    usual = {field.name: field.default for field in fields(experts) if field.name != "renormalize"}
    known = {
        name: value for name, value in vars(experts).items() if name not in usual or value != usual[name]
    }
    found: JsonValue = json.loads(json.dumps(known))
    return found
