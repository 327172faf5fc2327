"""The bias of routers that chooses experts and does not weigh them."""

import pytest
import torch

from learner.data.packing import pack
from tests.learner.backends.model.built import built_from, export_hf_weights
from tests.learner.tiny import hf_state, random_samples, tiny_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_the_bias_chooses_experts_and_stays_exact_in_bfloat16(family):
    reference = tiny_model(family)
    state = hf_state(reference)
    model = built_from(reference, dtype=torch.bfloat16)
    assert export_hf_weights([model], reference.config)[BIAS].equal(state[BIAS])
    [batch] = pack(random_samples([30]), 1000)
    unbiased = built_from(reference, {**state, BIAS: torch.zeros_like(state[BIAS])})
    assert (built_from(reference).logits(batch) - unbiased.logits(batch)).abs().max() > 1e-3
