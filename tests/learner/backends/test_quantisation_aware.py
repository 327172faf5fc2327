"""The learner computes with the weights that quantised engines have, and updates its own."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from actors.engines.embedded.prepared_weights import prepare_weights, without_quantisation
from actors.weights.received import torch_tensors
from bus.errors import ConfigError
from learner.backends.contract.backend import Backend
from learner.backends.factory import refuse_quantisation
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.backends.quantised.rounding import Rounding
from learner.backends.quantised.weights import RoundedWeights, WeightPart
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from storage.disk.checkpoints import latest
from storage.weights.fp8 import dequantised
from storage.weights.quantisation import BLOCKS, FORMATS
from storage.weights.quantised_tensors import quantised
from tests.learner.division import divide_world
from tests.learner.fp8_reference import served
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.slow

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=1e-4)
STEPS = 2
LARGE = {"hidden_size": 160, "intermediate_size": 272}
"""Sizes of which blocks of 128 cover some matrices several times, and not evenly."""
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
"""Sizes of which groups of 128 columns cover all matrices."""


def rounding(name: str, published: torch.dtype = torch.float32) -> Rounding:
    return Rounding(FORMATS[name], published)


def as_published(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return what the codes that are published of a weight stand for."""
    key = "layers.0.up_proj.weight"
    found = quantised(host_tensors({key: weight}), FORMATS[name])
    if name == "int4":
        return without_quantisation(torch_tensors(found))[key]
    codes, scales = found[key], found[key + FORMATS[name].suffix]
    counts = scales.shape or (1, 1)
    return torch.from_numpy(
        dequantised(codes.words.reshape(codes.shape), scales.words.view(np.float32).reshape(counts), BLOCKS)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_rounded_to_the_bit_as_its_published_codes_say(name, dtype):
    torch.manual_seed(0)
    weight = torch.randn(300, 256) * torch.logspace(-30, 3, 300)[:, None]
    weight[:128, :128] = 0.0
    weight[5, 130], weight[200, 3] = -0.0, 448.0
    found = rounding(name, dtype).of_whole(weight)
    assert torch.equal(found, as_published(weight.to(dtype), name))
    assert not torch.equal(found, weight)


def test_the_weights_of_engines_are_in_place_for_a_pass_and_the_gradient_goes_straight_through():
    weight = torch.tensor([[1.0, 0.3], [-0.77, 0.02]], requires_grad=True)
    rounded = RoundedWeights(
        rounding("fp8_tensor"), [WeightPart(weight.detach(), (2, 2), (2, 2))], [], weight.dtype
    )
    inputs = torch.tensor([3.0, -5.0])
    with rounded.in_place():
        # by hand: the scale is 1/448; 134.4, -344.96 and 8.96 become 128, -352 and 9
        expected = torch.tensor([[448.0, 128.0], [-352.0, 9.0]]) * np.float32(1 / 448)
        assert torch.equal(weight.detach(), expected)
        outputs = weight @ inputs
        (outputs**2).sum().backward()
    assert torch.equal(weight.detach(), torch.tensor([[1.0, 0.3], [-0.77, 0.02]]))
    assert torch.allclose(weight.grad, 2 * (expected @ inputs)[:, None] * inputs)  # d/dw of (w x)^2 at Q(w)


class StraightThrough:
    """AdamW of the weights as they were before a policy was given those of engines."""

    def __init__(self, policy: torch.nn.Module, name: str) -> None:
        self.policy, self.name = policy, name
        self.adamw = reference_optimizer(policy, OPTIMIZER)
        self.param_groups, self.zero_grad = self.adamw.param_groups, self.adamw.zero_grad

    @torch.no_grad()
    def begin(self) -> None:
        self.own = {key: value.clone() for key, value in self.policy.state_dict().items()}
        engines = prepare_weights(self.policy, served(hf_state(self.policy), self.name), complete=True)
        self.policy.load_state_dict(engines, strict=False)  # tied output layers have no entry

    def step(self) -> None:
        self.policy.load_state_dict(self.own)
        self.adamw.step()


@cache
def reference(name: str, model_changes: tuple[tuple[str, object], ...]):
    """Return what `train` should return, computed without any of the learner's code."""
    policy = tiny_model(**dict(model_changes))
    optimizer, steps, weights = StraightThrough(policy, name), [], []
    for step in range(STEPS):
        optimizer.begin()
        samples = random_samples(LENGTHS, seed=step)
        lr = OPTIMIZER.lr * min(1, (step + 1) / 2)
        steps.append(reference_step(policy, optimizer, samples, loss="tis", lr=lr))
        weights.append({key: value.clone() for key, value in hf_state(policy).items()})
    return steps, weights


def train(
    backend: type[Backend], name: str | None, model_changes: dict[str, object],
    layout: dict[str, object] | None = None, optimizer: OptimizerConfig = OPTIMIZER,
):  # fmt: skip
    """Return loss and norm of each step, and the weights after it; on a rank of a world."""
    parallel = ParallelConfig(**(layout or {}))
    divide_world(parallel)
    model = tiny_model(**model_changes)
    trainer = backend(model.config, hf_state(model), optimizer, parallel=parallel)
    if name is not None:
        trainer.compute_with(rounding(name))
    rank, ranks = trainer.data_parallel_group.rank(), trainer.data_parallel_group.size()
    results, weights = [], []
    for step in range(STEPS):
        samples = random_samples(LENGTHS, seed=step)[rank::ranks]
        result = trainer.train_step(pack(samples, 40), TIS, policy_version=3)
        results.append((result.loss, result.grad_norm))
        weights.append(trainer.export())
    return results, weights


def assert_follows_the_reference(found, name, model_changes):
    """The first step is the same. Later, errors of 1e-7 give some weights another code, a few % away; in int4
    the largest of half of the groups lies between two codes."""
    (steps, weights), (expected_steps, expected) = found, reference(name, tuple(model_changes.items()))
    assert steps[0] == pytest.approx(expected_steps[0], abs=2e-5)
    later = 5e-2 if name == "int4" else 2e-3
    for ours, wanted in zip(steps, expected_steps, strict=True):
        assert ours == pytest.approx(wanted, rel=later, abs=2e-5)
    for step, tolerance in ((0, 1e-5), (STEPS - 1, 5e-3 if name != "int4" else torch.inf)):
        for key, weight in weights[step].items():
            assert (weight - expected[step][key]).abs().max() < tolerance, (step, key)


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_steps_are_those_of_a_straight_through_written_from_its_definition(backend):
    found = train(backend, "fp8_block", LARGE)
    assert_follows_the_reference(found, "fp8_block", LARGE)
    plain, _ = train(backend, None, LARGE)
    assert abs(found[0][0][0] - plain[0][0]) > 1e-3  # the loss of other weights


MOE = {"family": "qwen3_moe"}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SP = {"tensor": 2, "sequence": True}
LAYOUTS = {
    "one rank, all in one": (1, Trainer, "fp8_tensor", {}, LARGE | {"tied": True}),
    "one rank, mixture": (1, FsdpTrainer, "fp8_ue8m0", {}, MOE),
    "dp2 overlapped": (2, Trainer, "fp8_block", OVERLAPPED, LARGE),
    "dp2 plain": (2, Trainer, "fp8_block", {"distributed_optimizer": False}, LARGE),
    "tp2": (2, Trainer, "fp8_block", SP, LARGE),
    "tp2 in one": (2, Trainer, "fp8_tensor", SP, LARGE),
    "tp2 of one key-value head": (2, Trainer, "fp8_block", SP, LARGE | {"num_key_value_heads": 1}),
    "tp2 etp2": (2, Trainer, "fp8_block", SP | {"expert_tensor": 2}, MOE),
    "tp2 ep2 qwen3-next": (2, Trainer, "fp8_ue8m0", SP | {"expert": 2}, {"family": "qwen3_next"}),
    "dp2 qwen3.5": (2, Trainer, "fp8_block", {}, {"family": "qwen3_5_text"}),
    "tp2 ep2 deepseek": (2, Trainer, "fp8_ue8m0", SP | {"expert": 2}, {"family": "deepseek_v3"}),
    "pp2": (2, Trainer, "fp8_block", {"pipeline": 2}, LARGE),
    "tp2 in int4": (2, Trainer, "int4", SP, WIDE),
    "tp2 of one key-value head in int4": (2, Trainer, "int4", SP, WIDE | {"num_key_value_heads": 1}),
    "fsdp2 in int4": (2, FsdpTrainer, "int4", {}, WIDE),
    "fsdp2": (2, FsdpTrainer, "fp8_block", {}, LARGE),
    "fsdp2 mixture": (2, FsdpTrainer, "fp8_block", {}, MOE),
    "fsdp3": (3, FsdpTrainer, "fp8_ue8m0", {"recompute": "full"}, LARGE),
}  # fmt: skip
"""Ranks, backend, format, `learner.parallel` and changes of the model."""


NIGHTLY = ("dp2 plain", "tp2", "tp2 of one key-value head", "fsdp2")
"""Layouts whose parts other layouts have too."""


@pytest.mark.first(4, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in LAYOUTS]
)
def test_every_layout_computes_with_the_weights_that_whole_matrices_give(worlds, name):
    ranks, backend, form, layout, changes = LAYOUTS[name]
    found = worlds.run(ranks, train, backend, form, changes, layout)[0]
    assert_follows_the_reference(found, form, changes)


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
@pytest.mark.parametrize("saved", [{"offload": 1.0}, {"matrices": "muon"}])
def test_the_optimizer_updates_the_weights_that_are_not_rounded(backend, saved):
    """Offloading changes no bit; Muon takes the gradients that AdamW would have been given."""
    optimizer = OPTIMIZER.model_copy(update=saved)
    steps, [*_, weights] = train(backend, "fp8_block", LARGE, optimizer=optimizer)
    expected, [*_, others] = train(backend, "fp8_block", LARGE)
    assert steps[0] == expected[0]
    same = [torch.equal(weights[name], other) for name, other in others.items()]
    assert all(same) == ("offload" in saved)
    _, [*_, unlike] = train(backend, None, LARGE, optimizer=optimizer)
    assert any(not torch.equal(weights[name], other) for name, other in unlike.items())


def trainer_of(backend: type[Backend], dtype: torch.dtype = torch.float32) -> Backend:
    model = tiny_model(**LARGE)
    trainer = backend(model.config, hf_state(model), OPTIMIZER, dtype=dtype)
    trainer.compute_with(rounding("fp8_block", dtype))
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_a_resume_goes_on_to_the_bit(backend, dtype, tmp_path: Path):
    trainer, resumed = (trainer_of(backend, dtype) for _ in range(2))
    batches = [pack(random_samples(LENGTHS, seed=step), 40) for step in range(2)]
    trainer.train_step(batches[0], TIS, policy_version=0)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    load_checkpoint(resumed, latest(tmp_path))
    losses = [each.train_step(batches[1], TIS, policy_version=1).loss for each in (trainer, resumed)]
    assert losses[0] == losses[1]
    weights = resumed.export()
    assert all(torch.equal(weights[name], weight) for name, weight in trainer.export().items())


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_the_runs_own_frozen_policies_are_rounded_and_those_of_directories_are_not(backend, tmp_path: Path):
    model, trainer = tiny_model(**LARGE), trainer_of(backend)
    plain = backend(model.config, hf_state(model), OPTIMIZER)
    batches = pack(random_samples(LENGTHS), 40)
    trainer.frozen.hold("reference")
    trainer.frozen.load("teacher", model.config, hf_state(model), tmp_path)
    scored = [trainer.logprobs(batches)[0]]
    for tag in ("reference", "teacher"):
        with trainer.frozen.in_place(tag):
            scored.append(trainer.logprobs(batches)[0])
    live, reference, teacher = (each.nan_to_num() for each in scored)
    assert torch.equal(reference, live)
    assert torch.equal(teacher, plain.logprobs(batches)[0].nan_to_num())
    assert (teacher - live).abs().max() > 1e-3


@pytest.mark.parametrize("backend", [Trainer, FsdpTrainer])
def test_experts_that_files_have_in_one_tensor_are_refused_by_name(backend):
    model = tiny_model("gpt_oss")
    names = r"model\.layers\.\d\.mlp\.experts\.\w+ holds 6 experts .* fp8_block is for experts"
    learner = LearnerConfig(publication={"quantisation": "fp8_block"})
    with pytest.raises(ConfigError, match=names):
        refuse_quantisation(learner, hf_state(model))
    refuse_quantisation(LearnerConfig(), hf_state(model))
    trainer = backend(model.config, hf_state(model), OPTIMIZER)
    with pytest.raises(ConfigError, match=names):
        trainer.compute_with(rounding("fp8_block"))


def test_settings_that_would_round_nothing_or_something_else_are_refused():
    with pytest.raises(ValidationError, match=r"quantisation_aware=true has no effect with .*=none"):
        LearnerConfig(quantisation_aware=True)
    with pytest.raises(ValidationError, match=r"quantisation_aware=true with learner.lora.rank=4: .* to 0"):
        LearnerConfig(
            quantisation_aware=True, publication={"quantisation": "fp8_block"},
            lora={"rank": 4, "publish": "merged"},
        )  # fmt: skip
