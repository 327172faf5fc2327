"""Qwen3-Next and Qwen3.5: gated delta nets whose states begin anew, and attention with gates."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from actors.engines.embedded.prepared_weights import prepare_weights
from bus.errors import ConfigError
from learner.backends.factory import refuse_batches, refuse_optimizers
from learner.backends.megatron.conversion import qwen3_next
from learner.backends.megatron.conversion.families import family_of, shape_of
from learner.backends.megatron.core.layout import layout_problems
from learner.backends.megatron.fingerprint import fingerprint
from learner.backends.megatron.model.exact import make_exact
from learner.backends.megatron.model.model import build_chunks
from learner.backends.megatron.model.requirements import unsupported
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.checkpoint.commit import save_checkpoint
from learner.config.batch import BatchConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from learner.publication.host_copy import HostCopy
from tests.learner.backends.model.built import build_model, built_from, logits_of_both
from tests.learner.tiny import (
    TIS,
    hf_gradients,
    hf_state,
    random_samples,
    reference_logits,
    tiny_config,
    tiny_model,
)

pytestmark = pytest.mark.slow

LENGTHS = [5, 60, 1, 32, 9]
OVER_CHUNKS = [1, 150, 3, 64, 2, 65, 130, 4, 71]
"""The delta rule is computed for 64 tokens at a time, and the convolution looks at 4."""
DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HEADS = {
    "mtp.fc.weight": torch.full((2, 4), 0.5),
    "mtp.layers.0.input_layernorm.weight": torch.ones(3),
    "mtp.layers.0.mlp.experts.1.up_proj.weight": torch.full((2, 3), 0.25),
}


def rotated(share: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share}}


@pytest.mark.parametrize("family", DELTA_FAMILIES)
@torch.no_grad()
def test_logits_of_a_pack_are_those_of_each_sequence_alone(family):
    found, expected = logits_of_both(family, {}, OVER_CHUNKS)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        rotated(0.25),
        rotated(0.5),
        rotated(1.0),
        {"linear_conv_kernel_dim": 3},
        {"linear_num_key_heads": 1},
        {"linear_num_key_heads": 4},
        {"linear_key_head_dim": 8},
        {"linear_value_head_dim": 16},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"num_key_value_heads": 1},
        {"mlp_only_layers": [0]},
        {"rms_norm_eps": 1e-6},
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_each_setting_matters(changes):
    found, expected = logits_of_both("qwen3_next", changes, LENGTHS)
    assert (found - expected).abs().max() < 1e-5
    other, _ = logits_of_both("qwen3_next", {}, LENGTHS)
    assert (found - other).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        "A_log",
        "dt_bias",
        "conv1d.weight",
        "linear_attn.norm.weight",
        "q_proj.weight",
        "shared_expert_gate.weight",
    ],
)
@torch.no_grad()
def test_each_of_these_weights_matters(name):
    reference, samples = tiny_model("qwen3_next"), random_samples(LENGTHS)
    [batch] = pack(samples, 1000)
    before = built_from(reference).logits(batch)
    for full, parameter in reference.named_parameters():
        if full.endswith(name):
            parameter.add_(torch.randn_like(parameter))
    found = built_from(reference).logits(batch)
    assert (found - before).abs().max() > 1e-3
    assert (found - reference_logits(reference, samples)).abs().max() < 1e-5


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.filterwarnings("ignore:If you are using transformer_engine")
def test_gradients_of_a_pack_are_those_of_each_sequence_alone(recompute):
    reference, samples = tiny_model("qwen3_5_text"), random_samples(OVER_CHUNKS)
    [batch] = pack(samples, 1000)
    [built] = build_chunks(
        reference.config, dtype=torch.float32, parallel=ParallelConfig(recompute=recompute)
    )
    built.load_state_dict(built_from(reference).state_dict())
    logprobs, _ = built.train()(batch)
    logprobs.mean().backward()
    logits = torch.log_softmax(reference_logits(reference, samples), -1)
    logits.gather(-1, batch.labels[:, None])[:, 0][batch.loss_mask].mean().backward()
    expected = hf_gradients(reference)
    shape, parameters = shape_of(reference.config), dict(built.named_parameters())
    for rule in family_of(reference.config).rules(shape):
        parts = rule.layout.split(parameters[rule.megatron].grad, shape)
        for name, found in zip(rule.parts, parts, strict=True):
            wanted = expected[name]
            bound = 1e-5 * max(1.0, wanted.abs().max().item())
            assert (found.reshape(wanted.shape) - wanted).abs().max() < bound, name


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_weights_that_lie_scattered_in_the_model_are_published_anew_after_each_step(family):
    model = tiny_model(family)
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
    published = []
    for step in range(2):
        trainer.train_step(pack(random_samples(LENGTHS, seed=step), 100), TIS, policy_version=3)
        found = asyncio.run(HostCopy(torch.float32).take(trainer.exported()).arrived())
        published.append({name: words.words.tobytes() for name, words in found.items()})
        exported = host_tensors(trainer.export())
        assert published[-1] == {name: words.words.tobytes() for name, words in exported.items()}
    assert all(published[0][name] != words for name, words in published[1].items())


def test_heads_for_several_next_tokens_are_exported_as_they_came_and_not_served_by_the_embedded_engine():
    model = tiny_model("qwen3_next")
    trainer = Trainer(model.config, {**hf_state(model), **HEADS}, OptimizerConfig(lr=1e-2))
    trainer.train_step(pack(random_samples(LENGTHS), 100), TIS, policy_version=3)
    exported = trainer.export()
    assert all(exported[name].equal(tensor) for name, tensor in HEADS.items())
    assert prepare_weights(model, exported, complete=True).keys() == model.state_dict().keys()


def test_conversion_keeps_heads_for_several_next_tokens_there_and_back(tmp_path):
    tiny_model("qwen3_next").save_pretrained(tmp_path / "hf")
    [file] = (tmp_path / "hf").glob("*.safetensors")
    whole = {**load_file(file), **HEADS}
    save_file(whole, file, metadata={"format": "pt"})
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    hf_config, state = load_hf_directory(tmp_path / "megatron")
    trainer = Trainer(hf_config, state, OptimizerConfig())
    assert trainer.export().keys() == whole.keys()
    save_checkpoint(trainer, tmp_path / "checkpoints", 1, {}, keep=1)
    for source, model in (("megatron", None), ("checkpoints", tmp_path / "hf")):
        megatron_to_hf(tmp_path / source, tmp_path / f"back from {source}", model)
        [back] = (tmp_path / f"back from {source}").glob("*.safetensors")
        found = load_file(back)
        assert found.keys() == whole.keys()
        assert all(tensor.equal(whole[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    "changes",
    [
        rotated(0.5), {"linear_conv_kernel_dim": 3}, {"linear_num_key_heads": 1},
        {"layer_types": ["full_attention", "linear_attention"]},
    ],
)  # fmt: skip
def test_a_checkpoint_of_other_sizes_is_told_apart(changes):
    ours, other = (fingerprint(tiny_config("qwen3_next", **each)) for each in ({}, changes))
    assert ours != other


def test_the_published_configurations_are_taken():
    layout = ParallelConfig(tensor=8, sequence=True, expert=64)
    for config, of_delta in ((Qwen3NextConfig(), 9), (Qwen3_5MoeTextConfig(), 11), (Qwen3_5TextConfig(), 11)):
        family = family_of(config)
        shape = family.shape(config)
        assert unsupported(config) == []
        fits = layout if shape.experts else ParallelConfig(tensor=8)
        assert layout_problems(fits, shape) == []
        layers = config.num_hidden_layers
        names = [part for rule in family.rules(shape) for part in rule.parts]
        of_mlp = 1 + 3 + 1 + 3 * shape.experts.count if shape.experts else 3
        assert len(names) == 3 + layers // 4 * (3 * of_delta + 8) + layers * of_mlp


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is supported"),
        ({"attention_bias": True}, "attention_bias=True: this bias is not supported"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads=4: must be a multiple of linear_num_key_heads"),
        ({"head_dim": 20}, "head_dim=20: the part of a head that is rotated must have an even width"),
        (rotated(0.75), "partial_rotary_factor=0.75: this part of a head cannot be rotated alone"),
        ({"num_experts": 0}, "num_experts=0: a model without experts is of the family qwen3_5_text"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "only full_attention and linear_attention are supported",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(changes, says):
    with pytest.raises(ConfigError) as error:
        build_model(tiny_config("qwen3_next", **changes), dtype=torch.float32)
    assert says in str(error.value)


@pytest.mark.parametrize(("version", "fits"), [("5.14.1", False), ("5.15.0", True), ("6.0.0.dev0", True)])
def test_a_transformers_without_the_functions_of_linear_attention_is_refused_by_its_release(
    monkeypatch, version, fits
):
    monkeypatch.setattr(qwen3_next.transformers, "__version__", version)
    problems = unsupported(tiny_config("qwen3_next"))
    assert [("from 5.15 on" in problem, "backend=fsdp" in problem) for problem in problems] == (
        [] if fits else [(True, True)]
    )


def test_linear_attention_of_other_families_is_refused():
    config = tiny_config("qwen3", layer_types=["full_attention", "full_attention"])
    config.layer_types = ["linear_attention", "full_attention"]
    [problem] = unsupported(config)
    assert problem.endswith("only full_attention and sliding_attention are supported")


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"tensor": 4, "sequence": True}, "linear_num_key_heads=2 does not divide by tensor=4"),
        ({"context": 4}, "linear_num_key_heads=2 does not divide by tensor * context=4: choose a divisor"),
        (
            {"tensor": 2, "sequence": True, "context": 2, "context_attention": "ring"},
            "linear_num_key_heads=2 does not divide by tensor * context=4: choose a divisor of 2",
        ),
    ],
)
def test_layouts_that_would_cut_a_state_are_refused(layout, says):
    with pytest.raises(ConfigError) as error:
        build_chunks(tiny_config("qwen3_next"), dtype=torch.float32, parallel=ParallelConfig(**layout))
    [_, problem] = str(error.value).splitlines()
    assert says in problem


def test_shared_prefixes_are_refused():
    config = tiny_config("qwen3_next")
    with pytest.raises(ConfigError, match="linear attention is not supported for sequences that share"):
        refuse_batches(ModelConfig(path="/m"), BatchConfig(share_prefixes=True), config)
    samples = random_samples(LENGTHS)
    [batch] = pack([samples[1], *samples], 1000, share_prefixes=True)
    with pytest.raises(ConfigError, match="share_prefixes=true: linear attention"):
        build_model(config, dtype=torch.float32).logits(batch)


def test_exact_arithmetic_and_muon_are_refused():
    model = tiny_model("qwen3_5_text")
    with pytest.raises(ConfigError, match=r"linear attention, or gates .*: set model\.numerics=fast"):
        make_exact(built_from(model))
    muon = OptimizerConfig(matrices="muon")
    with pytest.raises(ConfigError, match="matrices=muon: files of this model, a qwen3_5_text, have"):
        Trainer(model.config, hf_state(model), muon)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_muon_is_refused_before_a_warm_up_with_adamw(backend):
    adamw, muon = OptimizerConfig(), OptimizerConfig(matrices="muon")
    config, model = tiny_config("qwen3_5_text"), ModelConfig(path="/m")
    refuse_optimizers(model, [adamw], config, backend)
    refuse_optimizers(model, [adamw, muon], tiny_config(), backend)
    with pytest.raises(ConfigError, match=r"optimizer\.matrices=muon.*set it to adamw"):
        refuse_optimizers(model, [adamw, muon], config, backend)


def test_on_fsdp_frozen_linear_attention_is_no_hindrance_to_muon():
    config, muon = tiny_config("qwen3_5_text"), OptimizerConfig(matrices="muon")
    model = ModelConfig(path="/m", freeze=(r"linear_attn\.",))
    refuse_optimizers(model, [muon], config, "fsdp")


@pytest.mark.parametrize("family", DELTA_FAMILIES)
@torch.no_grad()
def test_in_bfloat16_logits_are_near_those_of_transformers(family):
    reference = tiny_model(family).bfloat16()
    samples = random_samples(LENGTHS)
    [batch] = pack(samples, 1000)
    expected = reference_logits(reference, samples)
    found = built_from(reference, dtype=torch.bfloat16).logits(batch)
    assert (found - expected).float().abs().mean() < 0.03 * expected.float().abs().mean()
