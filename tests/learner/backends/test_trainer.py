import dataclasses
import math

import numpy as np
import pytest
import torch

from bus.errors import TrainingError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.loss import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from tests.learner.reference import reference_optimizer, reference_ratios, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, reference_logits, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2, weight_decay=0.1, eps=1e-5)


@pytest.fixture(params=["megatron", pytest.param("fsdp", marks=pytest.mark.slow)])
def trainer_of(request):
    """Make a trainer of either backend for a model of transformers."""
    kind = {"megatron": Trainer, "fsdp": FsdpTrainer}[request.param]

    def make(model, optimizer=OPTIMIZER, **settings):
        return kind(model.config, hf_state(model), optimizer, **settings)

    return make


@pytest.mark.first(6, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("qwen3_moe", False),
        ("mixtral", False),
        ("glm4_moe", False),
        ("glm4", False),
        ("minimax_m2", False),
        pytest.param("glm4_moe_lite", False, marks=pytest.mark.slow),
        ("deepseek_v3", False),
        ("gemma3_text", True),
        ("gpt_oss", False),
        ("qwen3_next", False),
        ("qwen3_5_text", True),
        ("qwen3_5_moe_text", False),
        # test_parallelisms.py has these, too
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("mistral", False, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("loss", "config", "temperatures"),
    [pytest.param("sft", SFTLoss(), 1.0, marks=pytest.mark.nightly), ("tis", TIS, (0.5, 0.8, 2.0))],
)
def test_steps_follow_plain_torch_adamw(trainer_of, loss, config, temperatures, family, tied):
    reference = tiny_model(family, tied=tied)
    # AdamW makes much of small differences where the gradient is near 0, as in experts that see few tokens
    peak = 1e-2 if family == "qwen3" else 1e-3
    trainer = trainer_of(reference, OPTIMIZER.model_copy(update={"lr": peak}))
    optimizer = reference_optimizer(reference, OPTIMIZER)
    for step in range(2):
        samples = random_samples(LENGTHS, seed=step, temperatures=temperatures)
        lr = peak * min(1, (step + 1) / 2)
        ratios = reference_ratios(reference, samples, cap=2.0) if loss == "tis" else {}
        expected = reference_step(reference, optimizer, samples, loss=loss, lr=lr)
        result = trainer.train_step(pack(samples, 56), config, policy_version=3)
        assert (result.loss, result.grad_norm) == pytest.approx(expected, abs=2e-5)
        assert result.lr == pytest.approx(lr)
        assert result.ratios.keys() == ratios.keys()
        for name, expected in ratios.items():
            assert result.ratios[name] == pytest.approx(expected, rel=1e-4), name
    exported = trainer.export()
    expected = hf_state(reference)
    assert all((exported[name] - expected[name]).abs().max() < 1e-4 for name in exported)


def test_how_the_batch_is_split_into_micro_batches_does_not_matter(trainer_of):
    model = tiny_model()
    samples = random_samples(LENGTHS)
    results, weights = [], []
    for budget in (1, 40, 1000):
        trainer = trainer_of(model, OptimizerConfig(lr=1e-4))
        batches = pack(samples, budget)
        results.append(trainer.train_step(batches, TIS, policy_version=3))
        weights.append(torch.cat([tensor.flatten() for tensor in trainer.export().values()]))
    for result in results[1:]:
        assert result.tokens == results[0].tokens
        assert result.loss == pytest.approx(results[0].loss, abs=1e-5)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, abs=1e-5)
        assert result.diagnostics == pytest.approx(results[0].diagnostics, abs=1e-5)
    # a first AdamW update is lr * sign(gradient): only gradients near 0 can differ
    assert (weights[0] - weights[2]).abs().mean() < 1e-7


def test_data_from_the_policy_itself_shows_neither_mismatch_nor_drift(trainer_of):
    model = tiny_model()
    [sample] = random_samples([30])
    logits = reference_logits(model, [sample]).detach()
    labels = torch.from_numpy(sample.token_ids[1:]).long()
    logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, labels[:, None])[:, 0].numpy()
    own = sample.with_streams(behaviour_logprobs=np.append(np.float32(0), logprobs))
    result = trainer_of(model).train_step(pack([own], 100), TIS, policy_version=3)
    assert result.diagnostics["mismatch_nats"] < 1e-5
    assert result.diagnostics["ess_fraction"] == pytest.approx(1.0, abs=1e-5)
    assert result.diagnostics["truncated_fraction"] == 0.0
    assert 0 < result.diagnostics["entropy_nats"] < math.log(58)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_says_so(trainer_of, bad):
    trainer = trainer_of(tiny_model())
    samples = random_samples(LENGTHS)
    trainer.train_step(pack(samples, 100), TIS, policy_version=3)
    before = trainer.export()
    poisoned = dataclasses.replace(samples[0].with_streams(advantages=bad), loss_mask=np.ones(5, bool))
    result = trainer.train_step(pack([poisoned], 100), TIS, policy_version=3)
    assert result.skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export().items())
    assert (trainer.counts.steps_done, trainer.counts.updates_done) == (2, 1)
    good = trainer.train_step(pack(samples, 100), TIS, policy_version=3)
    assert not good.skipped
    assert math.isfinite(good.loss)


def test_so_many_updates_in_a_row_that_are_not_finite_end_training(trainer_of):
    trainer = trainer_of(tiny_model(), OPTIMIZER.model_copy(update={"max_skipped_in_a_row": 3}))
    good = random_samples(LENGTHS)
    bad = [dataclasses.replace(good[0].with_streams(advantages=math.nan), loss_mask=np.ones(5, bool))]

    def step(samples):
        return trainer.train_step(pack(samples, 100), TIS, policy_version=3)

    for samples in (bad, bad, good, bad):
        step(samples)
    assert step(bad).skipped
    with pytest.raises(
        TrainingError, match=r"3 updates in a row were skipped.*loss nan.*optimizer\.lr below 0\.01"
    ):
        step(bad)


def test_a_step_without_trained_tokens_is_skipped(trainer_of):
    trainer = trainer_of(tiny_model())
    sample = dataclasses.replace(random_samples([5])[0], loss_mask=np.zeros(5, bool))
    result = trainer.train_step(pack([sample], 100), TIS, policy_version=3)
    assert (result.skipped, result.tokens, result.loss) == (True, 0, 0.0)


def test_a_new_optimizer_starts_from_nothing(trainer_of):
    model = tiny_model()
    samples = random_samples(LENGTHS)
    trainer = trainer_of(model)
    for _ in range(2):
        trainer.train_step(pack(samples, 100), SFTLoss(), policy_version=0)
    fresh = type(trainer)(model.config, trainer.export(), OptimizerConfig(lr=1e-3))
    trainer.set_optimizer(OptimizerConfig(lr=1e-3))
    for _ in range(2):
        ours = trainer.train_step(pack(samples, 100), TIS, policy_version=3)
        theirs = fresh.train_step(pack(samples, 100), TIS, policy_version=3)
        assert (ours.loss, ours.grad_norm, ours.lr) == (theirs.loss, theirs.grad_norm, theirs.lr)
    assert trainer.counts.steps_done == 4


def test_bfloat16_weights_learn_with_float32_main_weights(trainer_of):
    trainer = trainer_of(tiny_model(), OptimizerConfig(lr=1e-3), dtype=torch.bfloat16)
    samples = random_samples(LENGTHS)
    losses = [trainer.train_step(pack(samples, 100), SFTLoss(), policy_version=0).loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in trainer.export().values()} == {torch.bfloat16}
