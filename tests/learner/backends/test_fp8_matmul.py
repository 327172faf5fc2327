"""Linear layers that multiply in fp8: what they compute, on a CPU with the numbers that a GPU has."""

import asyncio
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from bus.errors import ConfigError
from launch.settings.run_config import resolve
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised.matmul import Fp8Linear, product
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.warmup import WarmupConfig
from learner.data.packing import pack
from learner.initial.initial import prepare
from learner.progress.progress import Progress
from learner.run import service
from learner.run.restore import restore_alone
from tests.learner.division import divide_world
from tests.learner.mini_run import MiniRun
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4)
SIZES = {"head_dim": 32}
"""Sizes whose weights are multiples of 16 on two ranks, too."""


def rounded(matrix):
    """Each row as the multiples of its scale that e4m3 has."""
    scales = matrix.abs().amax(1, keepdim=True) / 448
    return (matrix / scales).to(torch.float8_e4m3fn).float() * scales


def test_a_product_is_of_the_nearest_codes_by_a_scale_of_each_row():
    torch.manual_seed(0)
    left, right = torch.randn(33, 64) * torch.logspace(-6, 3, 33)[:, None], torch.randn(48, 64)
    expected = rounded(left) @ rounded(right).t()
    assert ((product(left, right) - expected).abs() <= 1e-6 * left.abs() @ right.abs().t()).all()
    assert not torch.allclose(product(left, right), left @ right.t(), rtol=1e-3)
    assert not product(torch.zeros(3, 64), right).any()
    # by hand: the rows' scales are 1/448 and 2/448; 0.3 and 0.02 become the codes 128 and 9
    [[found]] = product(torch.tensor([[1.0, 0.3]]), torch.tensor([[2.0, 0.04]])).tolist()
    assert found == pytest.approx(2.0 + (128 / 448) * (9 * 2 / 448), rel=1e-6)


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_of_inputs_are_of_codes_and_those_of_weights_are_not(accumulates):
    torch.manual_seed(0)
    inputs, weight = torch.randn(2, 10, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    total = torch.ones(32, 64)

    def accumulate(_, flat, gradient):
        total.addmm_(gradient.t(), flat)

    outputs = Fp8Linear.apply(inputs, weight, accumulate if accumulates else None)
    gradient = torch.randn_like(outputs)
    outputs.backward(gradient)
    flat = gradient.flatten(0, 1)
    expected = rounded(flat) @ rounded(weight.detach().t()).t()
    assert torch.allclose(inputs.grad.flatten(0, 1), expected, rtol=1e-4, atol=1e-6)
    found = total - 1 if accumulates else weight.grad
    assert torch.allclose(found, flat.t() @ inputs.detach().flatten(0, 1), atol=1e-5)
    assert (weight.grad is None) == accumulates


def stepped(backend, in_fp8, layout=None, model_changes=None):
    """Return loss and norm of two steps, on a rank of a world."""
    parallel = ParallelConfig(**(layout or {}))
    divide_world(parallel)
    model = tiny_model(**SIZES, **(model_changes or {}))
    trainer = backend(model.config, hf_state(model), OPTIMIZER, parallel=parallel)
    if in_fp8:
        trainer.multiply_in_fp8()
    batches = (pack(random_samples(LENGTHS, seed=step), 56) for step in range(2))
    results = [trainer.train_step(batch, TIS, policy_version=3) for batch in batches]
    return [value for result in results for value in (result.loss, result.grad_norm)]


@pytest.mark.slow
def test_steps_of_both_backends_are_near_those_without_fp8_and_near_each_other():
    ours, theirs = (stepped(backend, in_fp8=True) for backend in (Trainer, FsdpTrainer))
    assert ours == pytest.approx(theirs, rel=1e-2, abs=5e-3)
    plain = stepped(Trainer, in_fp8=False)
    assert ours == pytest.approx(plain, rel=0.2, abs=0.1)
    assert max(abs(found - other) for found, other in zip(ours, plain, strict=True)) > 1e-3


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 2, "sequence": True, "recompute": "full"}, {"family": "qwen2"}),
        ({"tensor": 2, "sequence": True, "expert": 2}, {"family": "qwen3_moe", "moe_intermediate_size": 64}),
    ],
    ids=["tensor", "sequence", "experts"],
)
def test_ranks_that_share_layers_take_the_same_steps_but_for_the_scales_of_shared_rows(worlds, layout, model):
    found = worlds.run(2, stepped, Trainer, True, layout, model)[0]
    alone, plain = (stepped(Trainer, in_fp8, None, model) for in_fp8 in (True, False))
    assert found == pytest.approx(alone, rel=0.1, abs=0.05)
    assert max(abs(ours - other) for ours, other in zip(found, plain, strict=True)) > 1e-3


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_what_cannot_be_multiplied_in_fp8_is_refused_by_name(backend):
    model = tiny_model(intermediate_size=72)
    trainer = backend(model.config, hf_state(model), OPTIMIZER)
    with pytest.raises(
        ConfigError, match=r"fp8_matmul=true cannot multiply with .*mlp.*: multiples of 16 can"
    ):
        trainer.multiply_in_fp8()
    with pytest.raises(ValidationError, match=r"with learner.quantisation_aware=true: .* to those of no eng"):
        LearnerConfig(fp8_matmul=True, quantisation_aware=True, publication={"quantisation": "fp8_block"})
    with pytest.raises(ValidationError, match=r"fp8_matmul=true with learner.lora.rank=4: layers with"):
        LearnerConfig(fp8_matmul=True, lora={"rank": 4})
    with pytest.raises(ConfigError, match=r"fp8_matmul=true with model.dtype=float32: .* set model.dtype"):
        resolve({"learner": {"fp8_matmul": True}, "model": {"dtype": "float32"}})
    resolve({"learner": {"fp8_matmul": True}, "model": {"dtype": "bfloat16"}})


def test_a_model_without_layers_of_known_names_is_refused():
    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=1, n_head=4, n_positions=64, vocab_size=60)
    model = AutoModelForCausalLM.from_config(config)
    trainer = FsdpTrainer(config, hf_state(model), OPTIMIZER)
    with pytest.raises(ConfigError, match=r"fp8_matmul=true knows no layer of GPT2LMHeadModel, .* false"):
        trainer.multiply_in_fp8()


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def settings_in_fp8(tmp_path):
    run = MiniRun(None, tmp_path, None, tmp_path / "none")  # of which only the settings are asked for
    return replace(run.settings(fp8_matmul=True), warmup=WarmupConfig(steps=0))


@NO_GPU
@pytest.mark.usefixtures("in_process")
def test_a_learner_without_such_a_gpu_is_refused_before_its_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "restore_backend", None)
    with pytest.raises(ConfigError, match=r"true needs GPUs of compute capability 9.0 .* no GPU that torch"):
        service.build(settings_in_fp8(tmp_path), None, None, None, asyncio.Event())


@NO_GPU
def test_who_looks_back_at_a_run_without_such_a_gpu_has_the_same_products(tmp_path):
    settings = settings_in_fp8(tmp_path)
    initial, batches = prepare(settings, None), pack(random_samples(LENGTHS), 56)
    plain = replace(settings, learner=settings.learner.model_copy(update={"fp8_matmul": False}))
    found, other = (
        restore_alone(each, initial, None, Progress()).logprobs(batches)[0].nan_to_num()
        for each in (settings, plain)
    )
    assert 1e-4 < (found - other).abs().max() < 1
