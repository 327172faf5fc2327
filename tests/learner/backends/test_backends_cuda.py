"""Families, adapters, Muon and low precision on a GPU, against a CPU: `pytest -m gpu tests/learner`."""

import pytest
import torch

from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised import matmul
from learner.backends.quantised.matmul import NEEDED_CAPABILITY, product
from learner.backends.quantised.rounding import Rounding
from learner.config.lora import LoraConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from learner.publication.host_copy import HostCopy
from storage.weights.quantisation import FORMATS
from tests.learner.backends import divided_adapters, test_mtp_training, test_muon, test_quantisation_aware
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import FAMILIES, TIS, hf_state, random_samples, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4)
PUBLISHED_WIDTHS = {
    "family": "deepseek_v3", "hidden_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def steps_of_both(dtype: torch.dtype = torch.float32, **model: object):
    """Return loss and norm of each of four steps on the GPU, and of transformers' on the CPU."""
    reference = tiny_model(**model)
    trainer = Trainer(reference.config, hf_state(reference), OPTIMIZER, dtype=dtype)
    optimizer = reference_optimizer(reference, OPTIMIZER)
    found, expected = [], []
    for number in range(4):
        samples = random_samples(LENGTHS, seed=number)
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        found.append((result.loss, result.grad_norm))
        expected.append(reference_step(reference, optimizer, samples, loss="tis", lr=OPTIMIZER.lr))
    return found, expected


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_four_steps_are_those_of_transformers_on_a_cpu(family):
    for found, expected in zip(*steps_of_both(family=family), strict=True):
        assert found == pytest.approx(expected, abs=5e-5)


def test_latent_attention_as_wide_as_deepseeks_is_near_in_bfloat16():
    """Queries of 192 and values of 128 columns a head, which the kernel for any lengths takes padded."""
    for found, expected in zip(*steps_of_both(torch.bfloat16, **PUBLISHED_WIDTHS), strict=True):
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)


def test_attention_with_sinks_is_near_in_bfloat16():
    """No kernel of a GPU has sinks in float32, which a run is told at its start."""
    for found, expected in zip(*steps_of_both(torch.bfloat16, family="gpt_oss"), strict=True):
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_heads_for_several_next_tokens_learn_as_on_a_cpu(family):
    trainer = test_mtp_training.trainer_of(family)
    results = [test_mtp_training.step(trainer, number) for number in range(test_mtp_training.STEPS)]
    expected, weights = test_mtp_training.expected(family)
    for found, wanted in zip(map(test_mtp_training.figures, results), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3)
    for name, weight in trainer.export().items():
        assert (weight.cpu() - weights[name]).abs().max() < 1e-3, name


def test_muon_follows_its_papers():
    steps, weights = test_muon.train({}, {})
    expected_steps, expected = test_muon.reference(())
    for found, wanted in zip(steps, expected_steps, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    for name, weight in weights.items():
        assert (weight.cpu() - expected[name]).abs().max() < 1e-4, name


def test_each_step_of_adapters_is_the_same_on_both_backends():
    lora = LoraConfig(rank=4, alpha=6.0)
    ours, theirs = (divided_adapters.trained(backend, lora)[0] for backend in ("megatron", "fsdp"))
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_rounded_on_a_gpu_to_the_bit_as_on_a_cpu(name, dtype):
    torch.manual_seed(0)
    weight = torch.randn(3000, 2048) * torch.logspace(-30, 3, 3000)[:, None]
    rounding = Rounding(FORMATS[name], dtype)
    assert torch.equal(rounding.of_whole(weight.cuda()).cpu(), rounding.of_whole(weight))


@pytest.mark.parametrize("name", ["fp8_block", "int4"])
@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_step_with_rounded_weights_is_that_of_a_straight_through_on_a_cpu(backend, name):
    sizes = test_quantisation_aware.WIDE
    steps, weights = test_quantisation_aware.train(backend, name, sizes)
    expected_steps, expected = test_quantisation_aware.reference(name, tuple(sizes.items()))
    assert steps[0] == pytest.approx(expected_steps[0], abs=1e-4)
    for key, weight in weights[0].items():
        assert (weight.cpu() - expected[0][key]).abs().max() < 1e-4, key


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_copy_beside_the_next_step_has_the_weights_that_are_not_rounded(backend):
    """The step waits for the copy before it rounds them."""
    model = tiny_model(hidden_size=1024, intermediate_size=4096)
    trainer = backend(model.config, hf_state(model), OPTIMIZER, dtype=torch.bfloat16)
    trainer.compute_with(Rounding(FORMATS["fp8_block"], torch.bfloat16))
    expected = host_tensors({name: tensor.cpu() for name, tensor in trainer.export().items()})
    copied = HostCopy(torch.bfloat16).take(trainer.exported())
    trainer.before_change(copied.let_change)
    trainer.train_step(pack(random_samples(LENGTHS), 40), TIS, policy_version=0)
    copied.done.synchronize()
    for name, tensor in copied.wait().items():
        assert (tensor.words == expected[name].words).all(), name


@pytest.fixture
def hopper():
    """Skips the test on other GPUs. Asked at collection, the GPU would be of no use in forked workers."""
    if torch.cuda.get_device_capability() < NEEDED_CAPABILITY:
        pytest.skip("needs a GPU with products in fp8")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_a_gpu_multiplies_in_fp8_what_a_cpu_does(rows):
    torch.manual_seed(0)
    left, right = torch.randn(rows, 512).bfloat16(), torch.randn(272, 512).bfloat16()
    found, expected = product(left.cuda(), right.cuda()).cpu(), product(left.float(), right.float())
    assert found.dtype == torch.bfloat16
    # a Hopper cuts off each partial sum of codes at 14 binary digits: 0.1 of values whose mean size is 23,
    # a hundredth of what other codes or scales would make of them
    assert (found - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_steps_in_fp8_are_near_those_of_a_cpu(backend, monkeypatch):
    products, product_in_fp8 = [], matmul.product
    monkeypatch.setattr(matmul, "product", lambda *both: products.append(1) or product_in_fp8(*both))
    model = tiny_model(head_dim=32)
    trainer = backend(model.config, hf_state(model), OPTIMIZER, dtype=torch.bfloat16)
    trainer.multiply_in_fp8()
    optimizer = reference_optimizer(model, OPTIMIZER)
    for number in range(4):
        samples = random_samples(LENGTHS, seed=number)
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        expected = reference_step(model, optimizer, samples, loss="tis", lr=OPTIMIZER.lr)
        assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=0.2, abs=0.1)
    assert products
