"""OpenAI's gpt-oss: attention with sinks, windows in every other layer, experts with biases."""

from dataclasses import replace

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    GATE_UP,
    QKV_BIAS,
    SHARED_LAYER,
    Experts,
    Family,
    Gate,
    expert_rules,
    layer_rule,
)
from learner.backends.megatron.conversion.mixtral import local_experts

EXPERT = "mlp.experts.{}."
"""Begins the names of an expert's tensors, which are stacked in files."""
PROJECTIONS = tuple(f"{EXPERT}{part}_proj" for part in ("gate", "up", "down"))


def _experts(hf_config: PretrainedConfig) -> Experts:
    return replace(local_experts(hf_config), biased=True)


def gpt_oss(hf_config: PretrainedConfig) -> Family:
    """Return the family with the gate of a configuration."""
    gate, up, down = PROJECTIONS
    local = "mlp.experts.local_experts.{}"
    return Family(
        layer_rules=(
            *SHARED_LAYER,
            QKV_BIAS,
            layer_rule("self_attention.linear_proj.bias", ["self_attn.o_proj.bias"]),
            layer_rule("self_attention.core_attention.sinks", ["self_attn.sinks"]),
        ),
        router_rules=(
            layer_rule("mlp.router.weight", ["mlp.router.weight"]),
            layer_rule("mlp.router.bias", ["mlp.router.bias"]),
        ),
        expert_rules=(
            *expert_rules(*(f"{name}.weight" for name in PROJECTIONS)),
            layer_rule(f"{local}.linear_fc1.bias", [f"{gate}.bias", f"{up}.bias"], GATE_UP),
            layer_rule(f"{local}.linear_fc2.bias", [f"{down}.bias"]),
        ),
        experts=_experts,
        stacked={
            "mlp.experts.gate_up_proj": (f"{gate}.weight", f"{up}.weight"),
            "mlp.experts.gate_up_proj_bias": (f"{gate}.bias", f"{up}.bias"),
            "mlp.experts.down_proj": (f"{down}.weight",),
            "mlp.experts.down_proj_bias": (f"{down}.bias",),
        },
        gate=Gate(gain=hf_config.swiglu_alpha, offset=1.0, limit=hf_config.swiglu_limit),
        qkv_bias=True,
        biases=True,
        sinks=True,
        requirements=(
            ("attention_bias", lambda bias, _: bias, "linear layers of attention must have a bias"),
            ("hidden_act", lambda act, _: act == "silu", "only silu is supported"),
        ),
    )
