from transformers import PretrainedConfig

from learner.backends.megatron.conversion.base import SHARED_LAYER, Experts, Family, expert_rules, layer_rule


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
