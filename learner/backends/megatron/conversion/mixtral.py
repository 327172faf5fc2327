from dataclasses import replace

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    CHOICE_BIAS,
    GATE_UP,
    QKV_BIAS,
    SHARED_LAYER,
    Experts,
    Family,
    Gate,
    expert_rules,
    layer_rule,
    replaced,
)
from learner.backends.megatron.conversion.glm4_moe import PROJECTIONS
from learner.backends.megatron.conversion.partial_rotation import pieces_of, rotated_joint_norm, rotated_qkv


def local_experts(hf_config: PretrainedConfig) -> Experts:
    """Return experts in every layer, as `num_local_experts` counts them."""
    return Experts(
        count=hf_config.num_local_experts,
        per_token=hf_config.num_experts_per_tok,
        intermediate=hf_config.intermediate_size,
        sparse_layers=(True,) * hf_config.num_hidden_layers,
    )


MIXTRAL = Family(
    layer_rules=SHARED_LAYER,
    router_rules=(layer_rule("mlp.router.weight", ["block_sparse_moe.gate.weight"]),),
    expert_rules=expert_rules(*(f"block_sparse_moe.experts.{{}}.w{n}.weight" for n in (1, 3, 2))),
    experts=local_experts,
    requirements=(
        ("router_jitter_noise", lambda noise, _: not noise, "noise on the router is not supported"),
    ),
)


def minimax_m2(hf_config: PretrainedConfig) -> Family:
    """Return MiniMax-M2: experts chosen by sigmoids and a bias, and norms of all queries or keys of a token
    together; the configuration says how much of each head is rotated."""
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
        experts=lambda c: replace(local_experts(c), score="sigmoid", choice_bias=True),
        requirements=MIXTRAL.requirements,
        qk_norm=True,
        joint_norms=True,
        rotated_parts=(0.5, 1.0),
        rotation=pieces,
    )


EXPERT = "mlp.experts.{}."
"""Begins the names of an expert's tensors, which are stacked in files."""
EXPERT_PROJECTIONS = tuple(f"{EXPERT}{part}_proj" for part in ("gate", "up", "down"))


def gpt_oss(hf_config: PretrainedConfig) -> Family:
    """Return OpenAI's gpt-oss with the gate of a configuration: attention with sinks, windows in every other
    layer, experts with biases."""
    gate, up, down = EXPERT_PROJECTIONS
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
            *expert_rules(*(f"{name}.weight" for name in EXPERT_PROJECTIONS)),
            layer_rule(f"{local}.linear_fc1.bias", [f"{gate}.bias", f"{up}.bias"], GATE_UP),
            layer_rule(f"{local}.linear_fc2.bias", [f"{down}.bias"]),
        ),
        experts=lambda c: replace(local_experts(c), biased=True),
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
