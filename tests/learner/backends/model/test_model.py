import pytest
import torch

from bus.errors import ConfigError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.backends.model.built import build_model, built_from, export_hf_weights
from tests.learner.tiny import (
    FAMILIES,
    ROPES,
    SPARSE,
    hf_gradients,
    hf_state,
    random_samples,
    reference_logits,
    tiny_config,
    tiny_model,
)

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
"""A rotary embedding that scales nothing that fits the context."""


@pytest.mark.first(8, others=pytest.mark.slow)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_logits_equal_those_of_transformers_sequence_by_sequence(family, tied):
    reference = tiny_model(family, tied=tied)
    samples = random_samples([5, 17, 1, 32, 9])
    [batch] = pack(samples, 1000)
    difference = built_from(reference).logits(batch) - reference_logits(reference, samples)
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "rope"),
    [*(("llama", rope) for rope in ROPES), ("qwen2", "yarn"), ("qwen3", "yarn"), ("deepseek_v3", "mscale")],
)
@torch.no_grad()
def test_scaled_angles_are_those_of_transformers(family, rope):
    reference = tiny_model(family, rope=rope)
    samples = random_samples([5, 100, 1, 60, 9])
    [batch] = pack(samples, 1000)
    expected = reference_logits(reference, samples)
    assert (built_from(reference).logits(batch) - expected).abs().max() < 1e-5
    assert (reference_logits(tiny_model(family), samples) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "ropes"),
    [
        ("llama", DYNAMIC),
        (
            "gemma3_text",
            {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}, "full_attention": DYNAMIC},
        ),
    ],
)
def test_dynamic_angles_are_unscaled_up_to_the_context_and_longer_sequences_are_refused(family, ropes):
    model = tiny_model(family, rope_parameters=ropes, max_position_embeddings=32)
    trainers = [kind(model.config, hf_state(model), OptimizerConfig()) for kind in (Trainer, FsdpTrainer)]
    samples = random_samples([5, 32, 9])
    [batch] = pack(samples, 1000)
    expected = torch.log_softmax(reference_logits(model, samples).detach(), -1).gather(
        -1, batch.labels[:, None]
    )[:, 0]
    for trainer in trainers:
        [found] = trainer.logprobs([batch])
        assert (found[0] - expected)[batch.trained].abs().max() < 1e-5
        with pytest.raises(ConfigError, match="a sequence of 33 tokens is longer than max_position_embeddin"):
            trainer.logprobs(pack(random_samples([5, 33]), 1000))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)
@torch.no_grad()
def test_experts_are_placed_and_weighted_as_the_configuration_says(family, changes):
    reference = tiny_model(family, **changes)
    samples = random_samples([5, 17, 1, 32, 9])
    [batch] = pack(samples, 1000)
    difference = built_from(reference).logits(batch) - reference_logits(reference, samples)
    assert difference.abs().max() < 1e-5


@pytest.mark.first(4, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in SPARSE), ("qwen3_moe", {"norm_topk_prob": False})]
)
def test_gradients_through_the_router_equal_those_of_transformers(family, changes):
    reference = tiny_model(family, **changes)
    ours = built_from(reference)
    samples = random_samples([5, 17, 32, 9])
    [batch] = pack(samples, 1000)
    ours(batch)[0].sum().backward()
    logprobs = torch.log_softmax(reference_logits(reference, samples), dim=-1)
    trained = logprobs.gather(-1, batch.labels[:, None])[:, 0][batch.loss_mask]
    trained.sum().backward()
    expected = hf_gradients(reference)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.grad)
    found = export_hf_weights([ours], reference.config)
    routers = [name for name in found if name.endswith((".gate.weight", ".router.weight"))]
    assert len(routers) == (1 if family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite") else 2)
    assert all(expected[name].abs().max() > 1e-3 for name in routers)
    for name in found.keys() & expected.keys():  # biases by which experts are chosen have none
        assert torch.allclose(found[name], expected[name], atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("lengths", [[12], [8, 8, 8], [3, 30, 4, 15, 2, 2]])
@torch.no_grad()
def test_any_mix_of_lengths_gives_the_same_logits_as_each_sequence_alone(lengths):
    model = built_from(tiny_model())
    samples = random_samples(lengths)
    [together] = pack(samples, 1000)
    alone = torch.cat([model.logits(pack([sample], 1)[0]) for sample in samples])
    assert (model.logits(together) - alone).abs().max() < 1e-5


def test_gradients_of_a_pack_are_the_sum_of_those_of_its_sequences():
    packed, alone = built_from(tiny_model()), built_from(tiny_model())
    samples = random_samples([3, 30, 4, 15])
    [batch] = pack(samples, 1000)
    packed(batch)[0].sum().backward()
    for sample in samples:
        alone(pack([sample], 1)[0])[0].sum().backward()
    for ours, expected in zip(packed.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad, expected.grad, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_logprobs_of_the_trained_tokens_are_at_the_temperature():
    reference = tiny_model()
    samples = random_samples([6, 11], temperatures=0.7)
    [batch] = pack(samples, 100)
    logprobs, entropy = built_from(reference)(batch)
    distribution = torch.log_softmax(reference_logits(reference, samples) / 0.7, dim=-1)
    expected = distribution.gather(-1, batch.labels[:, None])[:, 0]
    assert torch.allclose(logprobs, expected[batch.loss_mask], atol=1e-5)
    expected_entropy = -(distribution.exp() * distribution).sum(-1)
    assert torch.allclose(entropy, expected_entropy[batch.loss_mask], atol=1e-5)


def test_every_unsupported_hyperparameter_is_named_at_once():
    config = tiny_config(
        "llama",
        hidden_act="gelu",
        attention_bias=True,
        mlp_bias=True,
        attention_dropout=0.1,
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        },
    )
    with pytest.raises(ConfigError) as error:
        build_model(config, dtype=torch.float32)
    for name in (
        "hidden_act='gelu'",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "rope_type='longrope': its angles depend on the longest sequence",
    ):
        assert name in str(error.value)


def test_a_scaling_that_is_not_known_is_refused_with_those_that_are():
    config = tiny_config("llama")
    config.rope_parameters["rope_type"] = "proportional"
    message = "rope_type='proportional': only default, linear, dynamic, llama3, yarn are supported"
    with pytest.raises(ConfigError, match=message):
        build_model(config, dtype=torch.float32)


def test_heads_that_are_rotated_in_part_are_refused():
    config = tiny_config("llama")
    config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5: this part of a head"):
        build_model(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        ("mixtral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen3_moe", {"use_sliding_window": True}),
    ],
)
@torch.no_grad()
def test_sliding_windows_are_those_of_transformers(family, changes):
    reference = tiny_model(family, sliding_window=8, **changes)
    samples = random_samples([5, 17, 1, 32, 9, 8])
    [batch] = pack(samples, 1000)
    expected = reference_logits(reference, samples)
    assert (built_from(reference).logits(batch) - expected).abs().max() < 1e-5
    everything = tiny_model(family, **({"sliding_window": None} if not changes else {}))
    assert (reference_logits(everything, samples) - expected).abs().max() > 1e-2


def test_a_window_that_no_sequence_fills_changes_nothing():
    wide, without = (tiny_model("mistral", sliding_window=size) for size in (17, None))
    [batch] = pack(random_samples([5, 17]), 1000)
    assert torch.equal(built_from(wide).logits(batch), built_from(without).logits(batch))


def test_layers_that_see_tokens_in_another_way_are_refused():
    config = tiny_config("qwen2")
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigError, match="only full_attention and sliding_attention are supported"):
        build_model(config, dtype=torch.float32)


def test_every_setting_of_experts_that_would_be_trained_wrongly_is_named():
    qwen = tiny_config("qwen3_moe", num_experts_per_tok=7, output_router_logits=True)
    with pytest.raises(ConfigError) as error:
        build_model(qwen, dtype=torch.float32)
    assert "num_experts_per_tok=7: must be at most num_experts" in str(error.value)
    assert "output_router_logits=True: it adds a load-balancing loss" in str(error.value)
    qwen2 = tiny_config("qwen2_moe", qkv_bias=False, num_experts=0)
    with pytest.raises(ConfigError) as error:
        build_model(qwen2, dtype=torch.float32)
    assert "num_experts=0: a model without experts is of the family qwen2" in str(error.value)
    assert "qkv_bias=False: queries, keys and values must have a bias" in str(error.value)
    mixtral = tiny_config("mixtral", router_jitter_noise=0.1, num_experts_per_tok=1)
    with pytest.raises(ConfigError) as error:
        build_model(mixtral, dtype=torch.float32)
    for name in ("router_jitter_noise=0.1", "num_experts_per_tok=1"):
        assert name in str(error.value)


def test_an_unknown_family_is_refused_with_those_known():
    config = tiny_config("llama")
    config.model_type = "mamba"
    with pytest.raises(
        ConfigError, match="'mamba' is unknown; known are deepseek_v3, gemma3_text, glm4, glm4_moe, glm4_"
    ):
        build_model(config, dtype=torch.float32)
