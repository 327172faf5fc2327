"""DeepSeek-V3: keys and values made of one narrow vector, experts chosen in groups."""

import math

import pytest
import torch
from structlog.testing import capture_logs
from transformers import DeepseekV3Config

from bus.errors import ConfigError
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.layout import layout_problems
from learner.backends.megatron.fingerprint import fingerprint
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.megatron.model.router_replay import of_best_groups
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.config.parallel import ParallelConfig
from tests.learner.backends.model.built import build_model, built_from, export_hf_weights, logits_of_both
from tests.learner.tiny import hf_state, tiny_config, tiny_model

LENGTHS = [5, 60, 1, 32, 9]
PUBLISHED = {
    "aux_loss_alpha": 0.001, "ep_size": 1, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "scoring_func": "sigmoid", "seq_aux": True, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
"""What config.json of DeepSeek-V3 says besides the defaults of transformers, which are its sizes."""


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None},
        {"q_lora_rank": None, "rope": "mscale", "n_group": 1, "topk_group": 1},
        {"rope": "yarn"},
        {"rope_interleave": False},
        {"v_head_dim": 48},
        {"v_head_dim": 32, "n_shared_experts": 2},
        {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
        {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 5},
    ],
)
def test_logits_are_those_of_transformers_as_the_configuration_says(changes):
    found, expected = logits_of_both("deepseek_v3", changes, LENGTHS)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"n_group": 1, "topk_group": 1}, {"rope": "mscale"}, {"rope_interleave": False}, {"rms_norm_eps": 0.1}],
)
@torch.no_grad()
def test_each_of_these_settings_matters(changes):
    """What the tests above compare is not the same whatever the configuration says."""
    found, _ = logits_of_both("deepseek_v3", changes, LENGTHS)
    other, _ = logits_of_both("deepseek_v3", {}, LENGTHS)
    assert (found - other).abs().max() > 1e-2


def test_norms_of_narrow_vectors_have_a_constant_of_their_own():
    found, expected = logits_of_both("deepseek_v3", {"rms_norm_eps": 0.1}, LENGTHS)
    assert (found - expected).abs().max() < 1e-5


def test_experts_of_all_but_the_best_groups_are_out():
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.5, 0.5, 0.4, 0.1, 0.3, 0.8]])
    inf = torch.inf
    two, one = of_best_groups(scores, 3, 2), of_best_groups(scores, 3, 1)
    # 0.9 alone is less than 0.5 and 0.5, or 0.3 and 0.8
    assert two.equal(torch.tensor([[-inf, -inf, -inf, 0.5, 0.5, 0.4, 0.1, 0.3, 0.8]]))
    assert one.equal(torch.tensor([[-inf, -inf, -inf, -inf, -inf, -inf, 0.1, 0.3, 0.8]]))
    assert of_best_groups(scores, 3, 3).equal(scores)
    assert of_best_groups(scores[:0], 3, 2).shape == (0, 9)


def test_routers_of_float32_that_are_rounded_are_told():
    model = tiny_model("deepseek_v3")
    for dtype, tensors in ((torch.bfloat16, [1]), (torch.float32, [])):
        with capture_logs() as said:
            load_hf_weights([build_model(model.config, dtype=dtype)], model.config, hf_state(model))
        rounded = [entry["tensors"] for entry in said if entry["event"] == "router_weights_rounded"]
        assert rounded == tensors


@pytest.mark.parametrize("query_rank", [40, None])
def test_names_and_bits_of_weights_are_those_of_transformers(query_rank):
    reference = tiny_model("deepseek_v3", q_lora_rank=query_rank)
    state = hf_state(reference)
    exported = export_hf_weights([built_from(reference)], reference.config)
    assert exported.keys() == state.keys()
    assert ("model.layers.0.self_attn.q_a_proj.weight" in exported) is (query_rank is not None)
    assert all(tensor.equal(state[name]) for name, tensor in exported.items())


def test_heads_for_several_next_tokens_are_no_part_of_the_model():
    reference = tiny_model("deepseek_v3", num_mtp_layers=1)
    state = hf_state(reference)
    more = {
        "model.layers.2.eh_proj.weight": torch.zeros(64, 128),
        "model.layers.2.shared_head.head.weight": torch.zeros(58, 64),
    }
    with capture_logs() as said:
        built = built_from(reference, {**state, **more})
    assert [(each["event"], each["tensors"]) for each in said] == [("weights_not_trained", 2)]
    assert export_hf_weights([built], reference.config).keys() == state.keys()
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.3\.mlp\.gate\.weight"):
        built_from(reference, {**state, "model.layers.3.mlp.gate.weight": torch.zeros(8, 64)})


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None}, {"kv_lora_rank": 16}, {"v_head_dim": 16}, {"qk_nope_head_dim": 16},
        {"rope_interleave": False}, {"n_group": 2}, {"topk_group": 3}, {"rope": "mscale"},
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_sizes_is_told_apart(changes):
    ours, other = (fingerprint(tiny_config("deepseek_v3", **each)) for each in ({}, changes))
    assert ours != other


def test_the_published_configuration_is_taken():
    config = DeepseekV3Config(**PUBLISHED)
    assert unsupported(config) == []
    layout = ParallelConfig(tensor=8, sequence=True, expert=64)
    assert layout_problems(layout, shape_of(config)) == []
    family = family_of(config)
    assert family.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert family.beside("model.layers.61.shared_head.norm.weight")
    assert not family.beside("model.layers.60.mlp.gate.weight")
    names = [part for rule in family.rules(family.shape(config)) for part in rule.parts]
    assert len(names) == 3 + 61 * 9 + 3 * 3 + 58 * (2 + 3 + 3 * 256)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_group": 3}, "n_group=3: groups must divide n_routed_experts"),
        ({"n_group": 8}, "n_group=8: groups must divide n_routed_experts into two or more"),
        ({"topk_group": 5}, "topk_group=5: must be at most n_group"),
        ({"topk_group": 1}, "topk_group=1: must be at most n_group, and so many groups must have"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok=None: must be a number of experts"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace=None: must be a number of layers"),
        ({"n_group": None}, "n_group=None: groups must divide"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False: weights of experts must be normalised"),
        ({"n_shared_experts": 0}, "n_shared_experts=0: there must be at least 1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: must be num_attention_heads"),
        ({"head_dim": 16}, "head_dim=16: must be qk_rope_head_dim"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': only sigmoid is supported"),
        ({"topk_method": "greedy"}, "topk_method='greedy': only noaux_tc is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: all layers but the first have experts"),
        ({"attention_bias": True}, "attention_bias=True: this bias is not supported"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        build_model(tiny_config("deepseek_v3", **changes), dtype=torch.float32)
    [_, problem] = str(error.value).splitlines()
    assert says in problem
