"""The embedded engine says where it sent each token of a mixture of experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engines.embedded.decoder import BatchedDecoder
from bus.errors import ConfigError
from tests.actors.tiny import request
from tests.actors.tiny import tiny_model as dense_model
from tests.learner.backends.router_reference import chosen_experts
from tests.learner.tiny import tiny_model

PROMPTS = ([3, 4, 5, 6, 7, 8, 9], [12], [13, 14, 15, 16], [3, 4, 5, 6, 7, 8, 9])


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("qwen2_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    ],
)
@torch.no_grad()
def test_each_token_has_the_experts_that_its_own_pass_chose(family, changes):
    model = tiny_model(family, **changes)
    decoder = BatchedDecoder(model, slots=3, prefill_tokens=16, seed=0, routed_experts=True)
    decoder.policy_version = 0
    asked = [
        replace(request(str(n), prompt, new=5 + 3 * n), experts_from=None if n == 1 else n)
        for n, prompt in enumerate(PROMPTS)
    ]  # rows end at different times and are moved
    decoder.submit(asked)
    finished = {}
    while decoder.busy:
        finished.update((each.request_id, generation) for each, generation in decoder.step())
    for n, prompt in enumerate(PROMPTS):
        found = finished[str(n)].routed_experts
        if n == 1:
            assert found is None
            continue
        whole = [*prompt, *finished[str(n)].token_ids.tolist()]
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, chosen_experts(model, whole)[n:-1])


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match=r"routed_experts: the model, a qwen3, has no experts"):
        BatchedDecoder(dense_model("qwen3", seed=0), slots=1, prefill_tokens=16, seed=0, routed_experts=True)
