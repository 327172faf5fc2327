"""GLM-4.5: heads rotated in part, experts chosen by a bias, layers that predict several next tokens."""

import pytest
import torch

from bus.errors import ConfigError
from learner.data.packing import pack
from tests.learner.backends.model.built import build_model, built_from, export_hf_weights
from tests.learner.tiny import hf_state, random_samples, reference_logits, tiny_config, tiny_model


@pytest.mark.parametrize(
    "changes",
    [
        {"use_qk_norm": False},
        {"attention_bias": False},
        {"n_shared_experts": 2, "routed_scaling_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"first_k_dense_replace": 0},
        {"n_group": 3, "topk_group": 2},
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers_as_the_configuration_says(changes):
    reference = tiny_model("glm4_moe", **changes)
    samples = random_samples([5, 17, 1, 32, 9])
    [batch] = pack(samples, 1000)
    difference = built_from(reference).logits(batch) - reference_logits(reference, samples)
    assert difference.abs().max() < 1e-5


def test_heads_for_several_next_tokens_are_no_part_of_the_model():
    reference = tiny_model("glm4_moe", num_mtp_layers=1)
    state = hf_state(reference)
    more = {
        "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.2.enorm.weight": torch.zeros(64),
    }
    exported = export_hf_weights([built_from(reference, {**state, **more})], reference.config)
    assert exported.keys() == state.keys()
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.1\.enorm\.weight"):
        built_from(reference, {**state, "model.layers.1.enorm.weight": torch.zeros(64)})
    with pytest.raises(
        ConfigError, match=r"unexpected model\.layers\.3\.mlp\.gate\.weight"
    ):  # of a longer model
        built_from(reference, {**state, "model.layers.3.mlp.gate.weight": torch.zeros(6, 64)})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_group": 4}, "n_group=4: groups must divide n_routed_experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False: weights of experts must be normalised"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25: this part of a head cannot be rotated alone",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        build_model(tiny_config("glm4_moe", **changes), dtype=torch.float32)
    assert says in str(error.value)
