"""Experts that are computed together do what they do one after another."""

import pytest
import torch
from structlog.testing import capture_logs

from learner.backends.megatron.model import grouped_experts
from learner.backends.megatron.model.grouped_experts import GroupedExperts
from learner.backends.megatron.model.lora import ChunkAdapters
from learner.backends.megatron.quantised import multiply_in_fp8
from learner.config.lora import LoraConfig
from learner.data.packing import pack
from tests.learner.backends.model.built import built_from
from tests.learner.tiny import hf_state, random_samples, tiny_model

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
FAMILIES = {
    "qwen3_moe": SIZES,
    "gpt_oss": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "swiglu_limit": 0.3},
}
"""Experts of SiLU alone, and experts with biases and a gate that is clamped."""


def adapted(model, lora, dtype):
    """Return a Megatron model like one of transformers, with adapters that are not 0 if there is `lora`."""
    built = built_from(model, dtype=dtype)
    if lora is not None:
        torch.manual_seed(3)
        ChunkAdapters([built], model.config, lora, hf_state(model))
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if name.endswith("lora_B"):
                    parameter.normal_(std=0.2)
    return built


def outcome(monkeypatch, *, grouped, dtype, lengths, family="qwen3_moe", device="cpu", lora=None):
    """Return the sum of squares of the logits, and all gradients of it."""
    monkeypatch.setattr(grouped_experts, "has_kernel", lambda _: grouped)
    calls = []
    product = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        grouped_experts.F, "grouped_mm", lambda *args, **kwargs: calls.append(1) or product(*args, **kwargs)
    )
    built = adapted(tiny_model(family, **FAMILIES[family]), lora, dtype)
    [batch] = pack(random_samples(lengths), 1000)
    total = built.logits(batch.to(torch.device(device))).float().square().mean()
    total.backward()
    monkeypatch.undo()
    assert bool(calls) is grouped
    trained = ((name, weight) for name, weight in built.named_parameters() if weight.requires_grad)
    return total.item(), {name: weight.grad.float().cpu() for name, weight in trained}


def assert_alike(monkeypatch, tolerance, **case):
    (found, gradients), (expected, others) = (
        outcome(monkeypatch, grouped=grouped, **case) for grouped in (True, False)
    )
    assert found == pytest.approx(expected, rel=tolerance)
    for name, gradient in others.items():
        difference = (gradients[name] - gradient).norm()
        assert difference <= tolerance * (gradient.norm() + 1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_outputs_and_gradients_are_the_same(monkeypatch, family):
    assert_alike(monkeypatch, 1e-6, family=family, dtype=torch.float32, lengths=[40, 60])


ADAPTED = LoraConfig(rank=8, experts=True)


@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj"), ("q_proj", "down_proj")])
def test_adapters_of_all_experts_are_computed_together_too(monkeypatch, targets):
    lora = ADAPTED.model_copy(update={"targets": targets})
    assert_alike(monkeypatch, 1e-5, dtype=torch.float32, lengths=[40, 60], lora=lora)


@pytest.mark.parametrize(
    "changes",
    [{"rank": 4}, {"weight_decomposed": True}, {"targets": ("q_proj", "experts.1.up_proj")}],
    ids=["narrow", "lengths of rows", "one expert"],
)
def test_adapters_that_the_kernel_does_not_take_are_computed_one_after_another(monkeypatch, changes):
    monkeypatch.setattr(grouped_experts, "has_kernel", lambda _: True)
    monkeypatch.setattr(grouped_experts, "grouped", None)
    lora = ADAPTED.model_copy(update=changes)
    built = adapted(tiny_model("qwen3_moe", **SIZES), lora, torch.bfloat16)
    [batch] = pack(random_samples([40, 60]), 1000)
    assert built.logits(batch).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_expert_without_tokens_has_no_gradient(monkeypatch, family):
    assert_alike(monkeypatch, 0.03, family=family, dtype=torch.bfloat16, lengths=[1])


def test_experts_that_multiply_in_fp8_are_not_computed_together_and_the_start_says_so(monkeypatch):
    monkeypatch.setattr(grouped_experts, "has_kernel", lambda _: True)
    monkeypatch.setattr(grouped_experts, "grouped", None)
    built = built_from(tiny_model("qwen3_moe", **SIZES, moe_intermediate_size=48))
    [batch] = pack(random_samples([40, 60]), 1000)
    with pytest.raises(TypeError):
        built.logits(batch)
    with capture_logs() as said:
        multiply_in_fp8([built])
    [line] = said
    assert (line["event"], line["experts_of_a_rank"]) == ("experts_one_after_another", 4)
    assert built.logits(batch).isfinite().all()


def test_experts_that_are_computed_together_wait_for_the_weights_of_each_as_their_layers_would(monkeypatch):
    """With learner.parallel.overlap_param_gather hooks of the layers wait, and no layer is called."""
    monkeypatch.setattr(grouped_experts, "has_kernel", lambda _: True)
    built, waited = built_from(tiny_model("qwen3_moe", **SIZES)), []
    experts = next(module for module in built.modules() if isinstance(module, GroupedExperts))
    layers = [layer for each in experts.local_experts for layer in (each.linear_fc1, each.linear_fc2)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, _: waited.append(layer))
    [batch] = pack(random_samples([40, 60]), 1000)
    built.logits(batch)
    assert {*waited} == {*layers}


def test_experts_of_widths_that_the_kernel_does_not_take_are_not_computed_together(monkeypatch):
    monkeypatch.setattr(grouped_experts, "has_kernel", lambda _: True)
    built = built_from(tiny_model("qwen3_moe", **SIZES, moe_intermediate_size=20), dtype=torch.bfloat16)
    [batch] = pack(random_samples([40, 60]), 1000)
    assert built.logits(batch).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[1], [40, 60, 300]])
def test_the_kernel_does_what_experts_do_one_after_another(monkeypatch, lengths, family):
    assert_alike(monkeypatch, 0.03, family=family, dtype=torch.bfloat16, lengths=lengths, device="cuda")


@pytest.mark.gpu
def test_the_kernel_does_what_adapted_experts_do_one_after_another(monkeypatch):
    lengths = [40, 60, 300]
    assert_alike(monkeypatch, 0.03, dtype=torch.bfloat16, lengths=lengths, device="cuda", lora=ADAPTED)
