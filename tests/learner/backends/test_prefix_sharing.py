"""Training that computes common prefixes once does what training that computes each of them does."""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import StepResult
from learner.backends.factory import refuse_batches
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.backends.megatron.weights.rank_weights import load_hf_weights
from learner.config.batch import BatchConfig
from learner.config.correction import SequenceTIS
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import GSPOLoss, PPOClipLoss, SFTLoss
from learner.config.model import ModelConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import Sample, pack
from learner.logprobs.logprobs import score
from learner.metrics.step_metrics import step_values
from learner.step.rl_step import train_on
from tests.learner.backends.model.built import build_model
from tests.learner.backends.shared_prefixes import OPTIMIZER, one_prompt, trainer_of
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.siblings import siblings
from tests.learner.tiny import FAMILIES, TIS, hf_state, tiny_config, tiny_model
from tests.learner.world.ranks_worker import group

STEPS = 2
REFUSED = ("gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose attention has sinks, or whose layers take a state from token to token."""
WINDOWLESS = {"gemma3_text": {"sliding_window": 256}}
"""What families with windows need so that prefixes may be shared."""
OBJECTIVES = {
    "token TIS": TIS,
    "sequences": Objective(GSPOLoss()),
    "entropy and sequence TIS": Objective(PPOClipLoss(), SequenceTIS(), entropy_coef=0.1),
    "demonstrations": Objective(SFTLoss()),
}


@cache
def trained(
    objective: Objective, *, share: bool, budget: int = 300, recompute: str = "none", family: str = "qwen3"
) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Return what each of some steps did, and the weights then."""
    trainer = trainer_of(ParallelConfig(recompute=recompute), family=family)
    results = [
        trainer.train_step(
            pack(siblings(seed=step), budget, share_prefixes=share), objective, policy_version=3
        )
        for step in range(STEPS)
    ]
    return results, trainer.export()


def assert_alike(found, expected) -> None:
    (steps, weights), (other_steps, other_weights) = found, expected
    for step, other in zip(steps, other_steps, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-6, abs=2e-6)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=5e-6)
        assert (step.tokens, step.denominator) == (other.tokens, other.denominator)
        assert step.diagnostics == pytest.approx(other.diagnostics, rel=5e-6, abs=1e-6)
    for name, weight in weights.items():
        assert (weight - other_weights[name]).abs().max() < 1e-5, name


@pytest.mark.first(3, others=pytest.mark.slow)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REFUSED])
def test_gradients_are_those_of_prompts_computed_for_each_trajectory(family):
    model = tiny_model(family, **WINDOWLESS.get(family, {}))
    samples = siblings()
    gradients = []
    for share in (True, False):
        built = build_model(model.config, dtype=torch.float32)
        load_hf_weights([built], model.config, hf_state(model))
        for batch in pack(samples, 10**6, share_prefixes=share):
            logprobs, entropy = built(batch)
            weights = batch.of_trained("advantages")
            (weights * logprobs + 0.1 * weights.square() * entropy).sum().backward()
        gradients.append({name: p.grad for name, p in built.named_parameters() if p.requires_grad})
    shared, apart = gradients
    for name, expected in apart.items():
        assert (shared[name] - expected).norm() <= 3e-6 * expected.norm(), name


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_are_those_of_prompts_computed_for_each_trajectory(name):
    found = trained(OBJECTIVES[name], share=True)
    expected = trained(OBJECTIVES[name], share=False)
    assert_alike(found, expected)
    assert all(
        step.computed_tokens < 0.6 * other.computed_tokens
        for step, other in zip(found[0], expected[0], strict=True)
    )


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.filterwarnings("ignore:If you are using transformer_engine")
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute):
    assert_alike(trained(TIS, share=True, recompute=recompute), trained(TIS, share=True))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("budget", [1, 90, 150, 10**6])
def test_micro_batches_change_nothing(budget):
    found = trained(OBJECTIVES["sequences"], share=True, budget=budget)
    assert_alike(found, trained(OBJECTIVES["sequences"], share=True))


def test_steps_are_those_of_transformers_and_torch():
    policy, trainer = tiny_model(), trainer_of()
    optimizer = reference_optimizer(policy, OPTIMIZER)
    for step in range(STEPS):
        samples = [without_weight(sample) for sample in siblings(seed=step)]
        batches = pack(samples, 150, share_prefixes=True)
        result = trainer.train_step(batches, TIS, policy_version=3)
        lr = OPTIMIZER.lr * min(1, (step + 1) / 3)
        loss, norm = reference_step(policy, optimizer, samples, loss="tis", lr=lr)
        assert result.loss == pytest.approx(loss, abs=3e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def without_weight(sample: Sample) -> Sample:
    return sample.with_streams(loss_weights=1.0, group_weights=1.0)


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("policy", [None, "reference"])
def test_passes_find_the_same_logprobs_in_the_order_of_the_samples(policy):
    trainer, samples = trainer_of(), siblings(prompts=3)
    reference = tiny_model(seed=1)
    trainer.frozen.load("reference", reference.config, hf_state(reference), Path("elsewhere"))
    samples = samples[::2] + samples[1::2]  # prompts are mixed
    apart = score(trainer, samples, policy=policy, tokens_per_micro_batch=100)
    for budget in (60, 250, 10**6):
        shared = score(trainer, samples, policy=policy, tokens_per_micro_batch=budget, share_prefixes=True)
        for sample, found, expected in zip(samples, shared, apart, strict=True):
            for name in ("logprobs", "entropy"):
                ours, theirs = getattr(found, name), getattr(expected, name)
                assert np.array_equal(np.isnan(ours), np.isnan(theirs))
                assert np.nanmax(np.abs(ours - theirs)) < 5e-6
            assert np.array_equal(np.isnan(found.logprobs[1:]), ~sample.loss_mask[1:])


def test_a_step_on_groups_uses_the_setting_in_training_and_in_passes(monkeypatch):
    groups = [one_prompt(group(1)), one_prompt(group(2))]
    results = []
    for share in (False, True):
        batch = BatchConfig(share_prefixes=share, tokens_per_micro_batch=200)
        learner = LearnerConfig(batch=batch, reference=ReferenceConfig(kl_coef=0.1))
        trainer = trainer_of()
        trainer.frozen.hold("reference")
        passed: list[int] = []
        monkeypatch.setattr(trainer, "logprobs", counting(trainer.logprobs, passed))
        results.append(train_on(trainer, groups, [1.0, 1.0], learner, step=1, policy_version=4)[1])
        assert sum(passed) == results[-1].computed_tokens
    apart, shared = results
    assert shared.loss == pytest.approx(apart.loss, rel=1e-6, abs=1e-6)
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    assert shared.diagnostics == pytest.approx(apart.diagnostics, rel=1e-5, abs=1e-6)
    assert shared.computed_tokens == apart.computed_tokens - 2 * 40
    values = step_values(shared)
    assert values["train/computed_tokens"] == shared.computed_tokens
    assert values["train/computed_per_trained"] == shared.computed_tokens / shared.tokens


def counting(logprobs, passed: list[int]):
    """A pass that notes how many tokens each micro-batch computes."""

    def counted(micro_batches):
        passed.extend(batch.computed_tokens for batch in micro_batches)
        return logprobs(micro_batches)

    return counted


def test_float32_on_a_gpu_is_refused_before_the_model_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"share_prefixes=true .* model.dtype=float32 on a GPU"):
        refuse_batches(ModelConfig(dtype="float32"), BatchConfig(share_prefixes=True), tiny_config())
    refuse_batches(ModelConfig(dtype="bfloat16"), BatchConfig(share_prefixes=True), tiny_config())
    refuse_batches(ModelConfig(dtype="float32"), BatchConfig(), tiny_config())


def test_a_sliding_window_in_shared_prefixes_is_refused_before_the_model_is_built():
    config, share = tiny_config("mistral", sliding_window=100), BatchConfig(share_prefixes=True)
    with pytest.raises(ConfigError, match="share_prefixes=true: a sliding window of 100 tokens"):
        refuse_batches(ModelConfig(), share, config)
    refuse_batches(ModelConfig(), BatchConfig(), config)
    refuse_batches(ModelConfig(), share, tiny_config("mistral", sliding_window=256))


def test_a_frozen_policys_window_in_shared_prefixes_is_refused_when_a_sequence_is_longer():
    built = build_model(tiny_config("mistral", sliding_window=9), dtype=torch.float32)
    [batch] = pack(siblings(), 10**6, share_prefixes=True)
    with pytest.raises(ConfigError, match="a sliding window of 9 tokens is not supported for sequences of"):
        built(batch)


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16_a_step_is_that_of_prompts_computed_for_each_trajectory():
    policy, results = tiny_model("qwen2", num_hidden_layers=4), []
    for share in (True, False):
        trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER, dtype=torch.bfloat16)
        batches = pack(siblings(prompts=4, answers=8), 400, share_prefixes=share)
        passed = trainer.logprobs(batches)
        results.append((trainer.train_step(batches, TIS, policy_version=3), passed))
    (shared, found), (apart, expected) = results
    assert shared.loss == pytest.approx(apart.loss, rel=1e-2, abs=1e-2)
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=2e-2)
    assert shared.diagnostics["entropy_nats"] == pytest.approx(apart.diagnostics["entropy_nats"], rel=5e-3)
    means = [float(torch.cat([values[0] for values in each]).nanmean()) for each in (found, expected)]
    assert means[0] == pytest.approx(means[1], rel=5e-3)
    assert shared.computed_tokens < 0.6 * apart.computed_tokens


# --- layouts of ranks ---


@dataclass(frozen=True)
class Case:
    """A layout, and the model it is tried on."""

    ranks: int
    layout: dict[str, object] = field(default_factory=dict)
    model: tuple[tuple[str, object], ...] = ()


MOE = (("family", "qwen3_moe"),)
LAYOUTS = {
    "dp2": Case(2),
    "tp2": Case(2, {"tensor": 2}),
    "tp2 sp": Case(2, {"tensor": 2, "sequence": True, "recompute": "selective"}),
    "pp2": Case(2, {"pipeline": 2}),
    "pp2 vpp2": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, (("num_hidden_layers", 4),)),
    "cp2": Case(2, {"context": 2}),
    "cp2 recomputed": Case(2, {"context": 2, "recompute": "selective"}),
    "cp2 ep2": Case(2, {"context": 2, "expert": 2}, MOE),
    "cp2 deepseek": Case(2, {"context": 2}, (("family", "deepseek_v3"),)),
    "ep2": Case(2, {"expert": 2}, MOE),
    "tp2 sp ep2": Case(2, {"tensor": 2, "sequence": True, "expert": 2, "recompute": "full"}, MOE),
}


def in_layout(case: Case, *, share: bool) -> tuple[list[StepResult], dict[str, Tensor], list[float]]:
    """Return what each step did, the weights then, and what a pass finds; on a rank of a world."""
    parallel = ParallelConfig(**case.layout)
    divide_world(parallel)
    trainer = trainer_of(parallel, **dict(case.model))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    results, sums = [], []
    for step in range(STEPS):
        samples = [sample for sample in siblings(seed=step) if sample.group % ranks == rank]
        batches = pack(samples, 300, share_prefixes=share)
        results.append(trainer.train_step(batches, TIS, policy_version=3))
        found = score(trainer, samples, tokens_per_micro_batch=400, share_prefixes=share)
        sums.append(float(sum(np.nansum(each.logprobs) for each in found)))
    return results, trainer.export(), sums


@cache
def unshared(
    model: tuple[tuple[str, object], ...],
) -> tuple[list[StepResult], dict[str, Tensor], list[float]]:
    """Return what one rank does that computes each prefix again."""
    return in_layout(Case(1, {}, model), share=False)


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_ranks_does_what_one_rank_without_sharing_does(worlds, name):
    case = LAYOUTS[name]
    answers = worlds.run(case.ranks, in_layout_shared, case)
    steps, weights, sums = unshared(case.model)
    assert_alike((answers[0][0], answers[0][1]), (steps, weights))
    parts = {rank: found for rank, (_, _, found) in enumerate(answers)}
    own = [parts[0]] if name.split()[0] not in ("dp2", "ep2") else list(parts.values())
    for step, total in enumerate(sums):
        assert math.fsum(part[step] for part in own) == pytest.approx(total, rel=1e-6)


def in_layout_shared(case: Case):
    return in_layout(case, share=True)
