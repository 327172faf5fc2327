"""Families as transformers computes them, against plain transformers and AdamW."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from bus.errors import ConfigError
from learner.backends.fsdp import self_check
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.shared.trainable import TrainableWeights
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.publication.host_copy import HostCopy
from tests.learner.backends.fsdp.families import FAMILIES, SIZES, family_config, family_model
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=3, weight_decay=0.1, eps=1e-4)
IN_EVERY_RUN = ("gpt_oss",)


@pytest.mark.first(4, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "family",
    [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_steps_follow_plain_transformers_and_adamw(family):
    reference = family_model(family)
    trainer = FsdpTrainer(reference.config, hf_state(reference), OPTIMIZER)
    optimizer = reference_optimizer(reference, OPTIMIZER)
    for step in range(3):
        samples = random_samples(LENGTHS, seed=step, temperatures=(0.5, 0.8, 2.0))
        lr = 1e-3 * min(1, (step + 1) / 3)
        expected = reference_step(reference, optimizer, samples, loss="tis", lr=lr)
        result = trainer.train_step(pack(samples, 56), TIS, policy_version=3)
        assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=5e-6, abs=3e-6)
    exported, expected = trainer.export(), hf_state(reference)
    assert exported.keys() == expected.keys() - trainer.model.hf.all_tied_weights_keys.keys()
    for name, weight in exported.items():
        assert (weight - expected[name]).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmo2", {"output_router_logits": True}, "output_router_logits=True adds a load-balancing loss"),
        ("olmo2", {"quantization_config": {"quant_method": "fp8"}}, "`launch convert dequantise` makes one"),
        ("gemma3", {"layer_types": ["linear_attention"] * 2}, "layer_types: linear_attention would mix"),
        (
            "llama with scaled rope",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 32,
                }
            },
            "rope_type='longrope': its angles would depend on the other sequences",
        ),
    ],
)
def test_what_a_pack_would_get_wrong_is_refused_by_name(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        FsdpTrainer(family_config(family, **changes), {}, OPTIMIZER)


def test_a_model_whose_packs_are_not_what_transformers_computes_is_refused(monkeypatch):
    model = family_model("olmo2")
    decoder = type(model.model)
    forward = decoder.forward

    def leaking(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.cumsum(1)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", leaking)
        with pytest.raises(
            ConfigError, match=r"log-probs in a pack are up to .* nats from transformers' own"
        ):
            FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    monkeypatch.setitem(self_check.LARGEST_DIFFERENCE, torch.float32, 1e-5)
    FsdpTrainer(model.config, hf_state(model), OPTIMIZER)


def test_a_window_that_only_a_mask_tells_of_is_refused():
    config = Qwen2MoeConfig(
        **SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=64,
    )  # fmt: skip
    state = hf_state(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ConfigError, match="its sliding window is in transformers' mask alone"):
        FsdpTrainer(config, state, OPTIMIZER)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    FsdpTrainer(config, state, OPTIMIZER)


def test_a_float32_buffer_is_published_as_it_is_computed_with():
    model = family_model("deepseek_v3")
    trainer = FsdpTrainer(model.config, hf_state(model), OPTIMIZER, dtype=torch.bfloat16)
    published = asyncio.run(HostCopy(torch.bfloat16).take(trainer.exported()).arrived())
    exact = {name for name, tensor in published.items() if tensor.dtype == "F32"}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_a_buffer_is_no_weight_to_train():
    only = TrainableWeights(train_only=("e_score_correction_bias",))
    with pytest.raises(ConfigError, match="'e_score_correction_bias' matches no weight"):
        FsdpTrainer(family_config("deepseek_v3"), {}, OPTIMIZER, trainable=only)


def test_all_weights_that_do_not_fit_are_named():
    model = family_model("olmo2")
    state = hf_state(model)
    del state["model.norm.weight"]
    state |= {"stray": torch.zeros(1), "lm_head.weight": torch.zeros(2, 2)}
    with pytest.raises(ConfigError) as error:
        FsdpTrainer(model.config, state, OPTIMIZER)
    for problem in ("missing model.norm.weight", "unexpected stray", "lm_head.weight is [2, 2], not"):
        assert problem in str(error.value)
