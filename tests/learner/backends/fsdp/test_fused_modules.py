"""Parts of transformers' models that are fused on GPUs, computed here by torch, against transformers."""

import pytest
import torch
import torch.nn.functional as F
from structlog.testing import capture_logs
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from learner.backends.fsdp import fused_modules, model
from learner.backends.fsdp.fused_modules import FusedModules
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from tests.learner.backends.fsdp.families import FAMILIES, family_model
from tests.learner.plain_kernels import plain_kernels
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_config, tiny_model

pytestmark = pytest.mark.slow

FOUND = {
    "llama with scaled rope": (5, 2, 2),
    "gemma3": (13, 2, 2),
    "gpt_oss": (5, 0, 0),  # it clamps its gates, and rotates by angles of half a head's width
    "deepseek_v3": (9, 3, 2),
    "olmo2": (9, 2, 2),
    "qwen3_next": (8, 4, 1),
    "qwen3_5": (8, 2, 1),
    "qwen3_5_moe": (8, 4, 1),
    "olmo_hybrid": (8, 2, 1),
    "lfm2": (7, 0, 1),  # its MLPs have other names
    "lfm2_moe": (7, 1, 1),
}
"""Norms, gates and attentions of each family's two layers that are recognised."""
OPTIMIZER = OptimizerConfig(lr=1e-2)
LENGTHS = [20, 9, 17, 3]


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(model, "are_wanted", lambda: True)


def gradients(hf_model, tokens):
    hf_model.zero_grad()
    logits = hf_model(tokens).logits
    F.cross_entropy(logits[0, :-1].float(), tokens[0, 1:]).backward()
    return logits, {name: each.grad for name, each in hf_model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_it_did(family):
    ours, theirs = family_model(family), family_model(family)
    torch.manual_seed(0)
    drawn = torch.get_rng_state()
    changed = FusedModules(ours)
    assert torch.equal(torch.get_rng_state(), drawn), "a run draws other numbers"
    assert (changed.norms, changed.gates, changed.rotations) == FOUND[family]
    tokens = torch.randint(0, ours.config.vocab_size, (1, 12))
    (found, of_ours), (expected, of_theirs) = (gradients(each, tokens) for each in (ours, theirs))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert of_ours.keys() == of_theirs.keys()
    for name, gradient in of_theirs.items():
        assert (of_ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-6, name


@pytest.mark.parametrize("family", ["llama with scaled rope", "gemma3", "qwen3_next"])
def test_a_family_rounds_no_more_in_bfloat16_than_transformers(family):
    wide, ours, theirs = (family_model(family) for _ in range(3))
    FusedModules(ours.bfloat16())
    theirs.bfloat16()
    for each in (ours, theirs):
        each.load_state_dict(wide.state_dict())
    wide.load_state_dict(ours.state_dict())  # with rounded weights
    tokens = torch.randint(0, ours.config.vocab_size, (1, 40))
    (exact, slopes), *others = (gradients(each, tokens) for each in (wide, ours, theirs))
    errors = [(logits.float() - exact).square().mean() for logits, _ in others]
    assert errors[0] < 1.1 * errors[1]
    away = [sum((of[name].float() - slopes[name]).square().sum() for name in slopes) for _, of in others]
    assert away[0] < 2 * away[1], "few numbers decide, at random"


def test_other_models_of_the_process_stay_as_they_are():
    own = LlamaRMSNorm.forward, LlamaMLP.forward
    changed, other = (family_model("llama with scaled rope") for _ in range(2))
    attention = type(changed.model.layers[0].self_attn)
    forward = attention.forward
    rotate = modeling_llama.apply_rotary_pos_emb
    FusedModules(changed)
    assert (LlamaRMSNorm.forward, LlamaMLP.forward, attention.forward) == (*own, forward)
    assert not any("forward" in vars(module) for module in other.modules())
    assert modeling_llama.apply_rotary_pos_emb is rotate
    scope = changed.model.layers[0].self_attn.forward.__globals__
    assert scope["apply_rotary_pos_emb"] is not rotate


@pytest.mark.parametrize(
    ("activation", "is_known"),
    [("silu", True), ("gelu_pytorch_tanh", True), ("gelu", False), ("relu", False)],
)
def test_gates_are_known_by_what_they_compute(activation, is_known):
    mlp = LlamaMLP(tiny_config("llama", hidden_act=activation))
    x = torch.randn(1, 5, 64)
    expected = mlp(x)
    assert FusedModules(mlp).gates == is_known
    assert torch.allclose(mlp(x), expected, atol=1e-6)


class Clamped(LlamaMLP):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        return self.down_proj(self.act_fn(gate) * up)


class Swapped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Unnormed(LlamaRMSNorm):
    def forward(self, hidden_states):
        return (
            self.weight * hidden_states / (hidden_states.abs().mean(-1, keepdim=True) + self.variance_epsilon)
        )


class OutsideTheRoot(LlamaRMSNorm):
    def forward(self, hidden_states):
        size = hidden_states.square().mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (size + self.variance_epsilon)


@pytest.mark.parametrize(
    "module",
    [
        Clamped(tiny_config("llama")),
        Swapped(tiny_config("llama")),
        Unnormed(16),
        OutsideTheRoot(16),
        torch.nn.LayerNorm(16),
        torch.nn.LayerNorm(16, bias=False),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_computes_otherwise_stays(module):
    changed = FusedModules(module)
    assert (changed.norms, changed.gates) == (0, 0)
    assert "forward" not in vars(module)


def test_what_rotates_neighbours_stays(monkeypatch):
    def of_neighbours(q, k, cos, sin, unsqueeze_dim=1):
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
        return tuple(x * cos[:, None] + y * sin[:, None] for x, y in zip((q, k), turned, strict=True))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", of_neighbours)
    assert FusedModules(tiny_model("llama")).rotations == 0


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        pytest.param({}, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(
            {"parallel": ParallelConfig(recompute="full")}, torch.float32, marks=pytest.mark.nightly
        ),
        ({"parallel": ParallelConfig(recompute="full")}, torch.bfloat16),
        ({"lora": LoraConfig(rank=4, weight_decomposed=True)}, torch.float32),
        pytest.param(
            {"lora": LoraConfig(rank=4, weight_decomposed=True)}, torch.bfloat16, marks=pytest.mark.nightly
        ),
    ],
)
def test_steps_are_those_of_transformers_modules(monkeypatch, settings, dtype):
    results = []
    for wanted in (False, True):
        monkeypatch.setattr(model, "are_wanted", lambda wanted=wanted: wanted)
        hf_model = tiny_model("qwen3", tied=True)
        torch.manual_seed(0)
        trainer = FsdpTrainer(hf_model.config, hf_state(hf_model), OPTIMIZER, dtype=dtype, **settings)
        assert (trainer.model.fused is not None) == wanted
        packs = pack(random_samples(LENGTHS), 30)
        steps = [trainer.train_step(packs, TIS, policy_version=3) for _ in range(2)]
        results.append([(step.loss, step.grad_norm) for step in steps])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.05}[dtype]
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


def test_gates_of_experts_with_adapters_are_fused(monkeypatch):
    hf_model, losses = tiny_model("mixtral"), []
    for wanted in (False, True):
        monkeypatch.setattr(model, "are_wanted", lambda wanted=wanted: wanted)
        lora = LoraConfig(rank=4, experts=True)
        trainer = FsdpTrainer(hf_model.config, hf_state(hf_model), OPTIMIZER, lora=lora)
        packs = pack(random_samples(LENGTHS), 30)
        losses.append([trainer.train_step(packs, TIS, policy_version=3).loss for _ in range(2)])
    assert trainer.model.fused.gates == 2
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


def test_the_pass_to_compare_with_stays_transformers_own(fused, monkeypatch):
    hf_model = tiny_model("qwen3")
    trainer = FsdpTrainer(hf_model.config, hf_state(hf_model), OPTIMIZER)
    [batch] = pack(random_samples(LENGTHS), 100)
    with torch.no_grad():
        [expected], [own] = trainer.model(batch, plain=True), trainer.logprobs([batch])
        for function in ("rms_norm", "gated", "rotated"):
            with monkeypatch.context() as patch:
                patch.setattr(fused_modules, function, lambda x, *_, **__: x + 1)
                assert torch.equal(trainer.model(batch, plain=True)[0], expected)
                [changed] = trainer.logprobs([batch])
            assert not torch.allclose(changed, own, equal_nan=True)


def test_arithmetic_of_engines_is_not_replaced(fused):
    hf_model = tiny_model("qwen3")
    given = hf_model.config, hf_state(hf_model), OPTIMIZER
    assert FsdpTrainer(*given, exact=True).model.fused is None
    of_server = FsdpTrainer(*given, dtype=torch.bfloat16, kernels=plain_kernels())
    assert of_server.model.fused is None
    assert FsdpTrainer(*given).model.fused is not None


def test_a_cpu_keeps_transformers_modules():
    hf_model = tiny_model("qwen3")
    assert FsdpTrainer(hf_model.config, hf_state(hf_model), OPTIMIZER).model.fused is None


def steps_in_bfloat16(**settings):
    hf_model = tiny_model("qwen3")
    trainer = FsdpTrainer(hf_model.config, hf_state(hf_model), OPTIMIZER, dtype=torch.bfloat16, **settings)
    packs = pack(random_samples(LENGTHS), 30)
    losses = [trainer.train_step(packs, TIS, policy_version=3).loss for _ in range(3)]
    trainer.model(packs[0])
    weight = trainer.model.hf.model.layers[0].mlp.up_proj.weight
    return losses, trainer.export(), isinstance(weight, DTensor)


def test_a_rank_that_is_alone_rounds_its_weights_once_in_a_step(monkeypatch):
    losses, weights, is_divided = steps_in_bfloat16()
    assert not is_divided
    monkeypatch.setattr(model, "_may_lie_twice", lambda *_: False)
    expected, expected_weights, is_divided = steps_in_bfloat16()
    assert is_divided
    assert losses == expected
    assert losses[0] != losses[2], "the weights have changed"
    assert all(torch.equal(weights[name], each) for name, each in expected_weights.items())


@pytest.mark.parametrize(
    "settings", [{"parallel": ParallelConfig(recompute="full")}, {"lora": LoraConfig(rank=4)}]
)
def test_weights_lie_in_memory_once_where_it_is_to_be_saved(settings):
    assert steps_in_bfloat16(**settings)[2]


@pytest.mark.parametrize(("room", "is_divided"), [(0.99, True), (1.01, False)])
def test_weights_lie_in_memory_once_where_it_is_short(monkeypatch, room, is_divided):
    count = sum(each.numel() for each in tiny_model("qwen3").parameters())
    # four bytes for each weight, its gradient and two moments; two for the copy, which may take an eighth
    monkeypatch.setattr(model, "free_bytes", lambda: 16 * count + room * 8 * 2 * count)
    with capture_logs() as logs:
        assert steps_in_bfloat16()[2] == is_divided
    assert [each["event"] for each in logs] == ["layers_rounded_for_each_pass"] * is_divided


def test_every_activation_of_a_gate_is_one_of_transformers():
    x = torch.randn(100)
    for name, ours in (("silu", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")):
        assert torch.allclose(ACT2FN[name](x), fused_modules.ACTIVATIONS[ours](x))
