"""gpt-oss: attention with sinks, experts with biases that files have in one tensor."""

import pytest
import torch
from transformers import GptOssConfig

from bus.errors import ConfigError
from learner.backends.factory import refuse_batches
from learner.backends.fsdp.fingerprint import fingerprint as fsdp_fingerprint
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.layout import layout_problems
from learner.backends.megatron.fingerprint import fingerprint
from learner.backends.megatron.model.attention.windows import windows_of
from learner.backends.megatron.model.model import build_chunks
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.megatron.weights.frozen_weights import freeze_others, frozen_weights
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.backends.shared.trainable import TrainableWeights
from learner.config.batch import BatchConfig
from learner.config.model import ModelConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from tests.learner.backends.model.built import build_model, built_from, export_hf_weights, logits_of_both
from tests.learner.tiny import hf_state, random_samples, reference_logits, tiny_config, tiny_model

LENGTHS = [5, 60, 1, 32, 9]
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 16,
}  # fmt: skip
PUBLISHED = {
    "num_hidden_layers": 24, "num_local_experts": 32, "initial_context_length": 4096, "rope_theta": 150000,
    "experts_per_token": 4, "router_aux_loss_coef": 0.9,
    "rope_scaling": YARN | {"original_max_position_embeddings": 4096},
}  # fmt: skip
"""What config.json of gpt-oss-20b says besides the defaults of transformers, without its quantization."""


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN},
        {"sliding_window": 3},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"swiglu_limit": 0.1},
        {"swiglu_alpha": 1.0},
        {"num_experts_per_tok": 2},
    ],
)
def test_logits_are_those_of_transformers_and_each_setting_matters(changes):
    found, expected = logits_of_both("gpt_oss", changes, LENGTHS)
    assert (found - expected).abs().max() < 1e-5
    other, _ = logits_of_both("gpt_oss", {}, LENGTHS)
    assert (found - other).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("name", ["self_attn.sinks", "o_proj.bias", "router.bias", "down_proj_bias"])
def test_each_of_these_weights_matters(name):
    reference = tiny_model("gpt_oss")
    samples = random_samples(LENGTHS)
    [batch] = pack(samples, 1000)
    before = built_from(reference).logits(batch)
    changed = [parameter for full, parameter in reference.named_parameters() if full.endswith(name)]
    for parameter in changed:
        parameter.add_(torch.randn_like(parameter))
    found = built_from(reference).logits(batch)
    assert len(changed) == 2
    assert (found - before).abs().max() > 1e-2
    assert (found - reference_logits(reference, samples)).abs().max() < 1e-5


def test_files_have_all_experts_of_a_layer_in_one_tensor():
    reference = tiny_model("gpt_oss")
    state = hf_state(reference)
    exported = export_hf_weights([built_from(reference)], reference.config)
    assert exported.keys() == state.keys()
    assert exported["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 64, 80)
    assert all(tensor.equal(state[name]) for name, tensor in exported.items())


def test_misfits_are_told_by_the_names_of_files():
    reference = tiny_model("gpt_oss")
    state = hf_state(reference)
    del state["model.layers.1.mlp.experts.down_proj"]
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(6, 64, 78)
    built = build_model(reference.config, dtype=torch.float32)
    with pytest.raises(ConfigError) as error:
        load_hf_weights([built], reference.config, state)
    assert str(error.value).splitlines()[1:] == [
        "- model.layers.0.mlp.experts.gate_up_proj is [6, 64, 78], not [6, 64, 80]",
        "- missing model.layers.1.mlp.experts.down_proj [6, 40, 64]",
    ]


def test_weights_are_frozen_by_the_names_of_files():
    config = tiny_config("gpt_oss")
    built = build_model(config, dtype=torch.float32)
    trainable = TrainableWeights(freeze=(r"layers\.1\.mlp\.experts\.gate_up_proj$",))
    freeze_others([built], config, frozen_weights(config, trainable))
    frozen = {name for name, parameter in built.named_parameters() if not parameter.requires_grad}
    experts = "decoder.layers.1.mlp.experts.local_experts"
    assert frozen == {f"{experts}.{number}.linear_fc1.weight" for number in range(6)}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN}, {"sliding_window": 3}, {"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0},
        {"rms_norm_eps": 1e-3},
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_attention_and_other_arithmetic_is_told_apart_by_both_backends(changes):
    for backend in (fingerprint, fsdp_fingerprint):
        ours, other = (backend(tiny_config("gpt_oss", **each)) for each in ({}, changes))
        assert ours != other


def test_the_published_configuration_is_taken():
    config = GptOssConfig(**PUBLISHED)
    assert unsupported(config) == []
    assert windows_of(config)[:3] == [128, None, 128]
    assert layout_problems(ParallelConfig(tensor=8, sequence=True, expert=32), shape_of(config)) == []
    family = family_of(config)
    names = [part for rule in family.rules(family.shape(config)) for part in rule.parts]
    assert len(names) == 3 + 24 * (2 + 4 * 2 + 1 + 2 + 6 * 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": False}, "attention_bias=False: linear layers of attention must have a bias"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: dropout is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "launch convert dequantise reads other kinds"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        build_model(tiny_config("gpt_oss", **changes), dtype=torch.float32)
    [_, problem] = str(error.value).splitlines()
    assert says in problem


def test_ranks_that_share_an_expert_are_refused():
    shared = ParallelConfig(tensor=2, sequence=True, expert_tensor=2)
    [problem] = layout_problems(shared, shape_of(tiny_config("gpt_oss")))
    assert problem.startswith("expert_tensor=2: ranks that share an expert would each add its bias")


def test_keys_that_pass_by_are_refused():
    ring = ParallelConfig(context=2, context_attention="ring")
    with pytest.raises(ConfigError, match="context_attention=ring does not have attention with sinks"):
        build_chunks(tiny_config("gpt_oss"), dtype=torch.float32, parallel=ring)


def test_shared_prefixes_are_refused():
    config = tiny_config("gpt_oss", sliding_window=256)
    with pytest.raises(ConfigError, match="attention with sinks is not supported for sequences that share"):
        refuse_batches(ModelConfig(path="/m"), BatchConfig(share_prefixes=True), config)
    samples = random_samples(LENGTHS)
    [batch] = pack([samples[1], *samples], 1000, share_prefixes=True)
    with pytest.raises(ConfigError, match="share_prefixes=true: attention with sinks"):
        build_model(config, dtype=torch.float32).logits(batch)


@torch.no_grad()
def test_in_bfloat16_logits_are_near_those_of_transformers():
    reference = tiny_model("gpt_oss").bfloat16()
    samples = random_samples(LENGTHS)
    [batch] = pack(samples, 1000)
    expected = reference_logits(reference, samples)
    found = built_from(reference, dtype=torch.bfloat16).logits(batch)
    assert (found - expected).float().abs().mean() < 0.03 * expected.float().abs().mean()
