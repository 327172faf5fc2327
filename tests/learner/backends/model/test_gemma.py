"""Gemma 3: two rotary embeddings, norms around attention and MLP, windows in most layers."""

import pytest
import torch
from transformers import Gemma3TextConfig

from bus.errors import ConfigError
from learner.backends.megatron.conversion.families import family_of
from learner.backends.megatron.fingerprint import fingerprint
from learner.backends.megatron.model.attention.windows import windows_of
from learner.backends.megatron.model.requirements import unsupported
from learner.data.packing import pack
from tests.learner.backends.model.built import build_model, built_from, logits_of_both
from tests.learner.tiny import random_samples, reference_logits, tiny_config, tiny_model

LENGTHS = [5, 60, 1, 32, 9]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
PUBLISHED = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
    "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "vocab_size": 262144,
    "max_position_embeddings": 32768, "rope_scaling": None, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
"""What config.json of gemma-3-1b-it says."""


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": ROPES},
        {"query_pre_attn_scalar": 3},
        {"sliding_window": 3},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rms_norm_eps": 0.1},
        {"tie_word_embeddings": True},
    ],
)
def test_logits_are_those_of_transformers_and_each_setting_matters(changes):
    found, expected = logits_of_both("gemma3_text", changes, LENGTHS)
    assert (found - expected).abs().max() < 1e-5
    other, _ = logits_of_both("gemma3_text", {}, LENGTHS)
    assert (found - other).abs().max() > 1e-2


@torch.no_grad()
def test_in_bfloat16_norms_and_embeddings_are_rounded_as_by_transformers():
    reference = tiny_model("gemma3_text", hidden_size=80).bfloat16()  # whose root is no bfloat16
    samples = random_samples(LENGTHS)
    [batch] = pack(samples, 1000)
    found, expected = (
        built_from(reference, dtype=torch.bfloat16).logits(batch),
        reference_logits(reference, samples),
    )
    assert (found - expected).float().abs().mean() < 0.02 * expected.float().abs().mean()


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": ROPES}, {"query_pre_attn_scalar": 3}, {"sliding_window": 3}]
)
def test_a_checkpoint_of_other_attention_is_told_apart(changes):
    ours, other = (fingerprint(tiny_config("gemma3_text", **each)) for each in ({}, changes))
    assert ours != other


def test_the_published_configuration_is_taken():
    config = Gemma3TextConfig(**PUBLISHED)
    assert unsupported(config) == []
    assert windows_of(config)[:7] == [512, 512, 512, 512, 512, None, 512]
    family = family_of(config)
    assert family.attention_scale == 1 / 16
    names = [part for rule in family.rules(family.shape(config)) for part in rule.parts]
    assert len(names) == 2 + 26 * 13


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu': only gelu_pytorch_tanh is supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: capped scores are not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0: capped logits are not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True: a token that sees later"),
        ({"attention_bias": True}, "attention_bias=True: this bias is not supported"),
        (
            {"rope_parameters": {**ROPES, "full_attention": {"rope_type": "longrope", **LONGROPE}}},
            "rope_type='longrope': its angles depend on the longest sequence",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        build_model(tiny_config("gemma3_text", **changes), dtype=torch.float32)
    [_, problem] = str(error.value).splitlines()
    assert says in problem
