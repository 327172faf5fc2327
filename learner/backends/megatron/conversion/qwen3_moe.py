from learner.backends.megatron.conversion.base import QK_NORM, SHARED_LAYER, Family
from learner.backends.megatron.conversion.qwen2_moe import (
    DECODER_SPARSE_STEP,
    QWEN_EXPERT,
    QWEN_ROUTER,
    qwen_experts,
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
