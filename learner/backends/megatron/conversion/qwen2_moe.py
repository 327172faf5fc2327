from dataclasses import replace

from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    QK_NORM,
    QKV_BIAS,
    SHARED_LAYER,
    Experts,
    Family,
    Requirement,
    expert_rules,
    layer_rule,
    shared_expert_rules,
)


def qwen_experts(hf_config: PretrainedConfig) -> Experts:
    """Read the experts that tokens are sent to, and the layers that have some."""
    dense = set(hf_config.mlp_only_layers or ())
    step = hf_config.decoder_sparse_step
    return Experts(
        count=hf_config.num_experts,
        per_token=hf_config.num_experts_per_tok,
        intermediate=hf_config.moe_intermediate_size,
        sparse_layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(hf_config.num_hidden_layers)
        ),
        renormalize=hf_config.norm_topk_prob,
    )


def experts_beside_shared(hf_config: PretrainedConfig) -> Experts:
    """Read the same with the expert that every token passes through."""
    return replace(qwen_experts(hf_config), shared=hf_config.shared_expert_intermediate_size)


QWEN_ROUTER = (layer_rule("mlp.router.weight", ["mlp.gate.weight"]),)
QWEN_EXPERT = expert_rules(*(f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")))
SHARED_EXPERT = (
    *shared_expert_rules("mlp.shared_expert"),
    layer_rule("mlp.shared_experts.gate_weight", ["mlp.shared_expert_gate.weight"]),
)
DECODER_SPARSE_STEP: Requirement = ("decoder_sparse_step", lambda step, _: step >= 1, "must be at least 1")
QWEN2_MOE = Family(
    layer_rules=(*SHARED_LAYER, QKV_BIAS),
    router_rules=(*QWEN_ROUTER, *SHARED_EXPERT),
    expert_rules=QWEN_EXPERT,
    experts=experts_beside_shared,
    requirements=(
        ("num_experts", lambda count, _: bool(count), "a model without experts is of the family qwen2"),
        ("qkv_bias", lambda bias, _: bias is not False, "queries, keys and values must have a bias"),
        DECODER_SPARSE_STEP,
    ),
    qkv_bias=True,
)
QWEN3_MOE = Family(
    layer_rules=(*SHARED_LAYER, *QK_NORM),
    router_rules=QWEN_ROUTER,
    expert_rules=QWEN_EXPERT,
    experts=qwen_experts,
    requirements=(
        ("num_experts", lambda count, _: bool(count), "a model without experts is of the family qwen3"),
        DECODER_SPARSE_STEP,
    ),
    qk_norm=True,
)
