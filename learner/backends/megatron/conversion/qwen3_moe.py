from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import (
    QK_NORM,
    SHARED_LAYER,
    Experts,
    Family,
    expert_rules,
    layer_rule,
)


def _experts(hf_config: PretrainedConfig) -> Experts:
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


QWEN3_MOE = Family(
    layer_rules=(*SHARED_LAYER, *QK_NORM),
    router_rules=(layer_rule("mlp.router.weight", ["mlp.gate.weight"]),),
    expert_rules=expert_rules(*(f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down"))),
    experts=_experts,
    requirements=(
        ("num_experts", lambda count, _: bool(count), "a model without experts is of the family qwen3"),
        ("decoder_sparse_step", lambda step, _: step >= 1, "must be at least 1"),
    ),
    qk_norm=True,
)
