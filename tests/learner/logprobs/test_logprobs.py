"""Passes that only take log-probs, under the current and other policies, against transformers."""

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.backends.output import output_layer as head
from learner.backends.output import policy_output
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.logprobs.logprobs import TokenScores, score
from learner.publication.probe import probe_tokens, scored_probe
from tests.learner.division import divide_world
from tests.learner.tiny import TIS, hf_state, random_samples, reference_logits, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20, 20, 3]
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Case:
    """A layout, and the model it is tried on."""

    ranks: int
    layout: dict[str, object] = field(default_factory=dict)
    model: tuple[tuple[str, object], ...] = ()


TIED = (("tied", True),)
FOUR_LAYERS = (("num_hidden_layers", 4),)
MOE = (("family", "qwen3_moe"),)
CASES = {
    "dp2": Case(2),
    "dp2 overlapped": Case(2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2 odd vocabulary": Case(2, {"tensor": 2}, (("vocab_size", 59),)),
    "tp2 sp recomputed": Case(2, {"tensor": 2, "sequence": True, "recompute": "full"}),
    "pp2 tied": Case(2, {"pipeline": 2}, TIED),
    "pp2 vpp2": Case(2, {"pipeline": 2, "virtual_pipeline": 2}, FOUR_LAYERS),
    "cp2": Case(2, {"context": 2}),
    "cp2 short whole": Case(2, {"context": 2, "context_min_tokens": 18}),
    "tp2 sp ep2": Case(2, {"tensor": 2, "sequence": True, "expert": 2}, MOE),
    "pp2 cp2": Case(4, {"pipeline": 2, "context": 2}),
    "pp2 ep2": Case(4, {"pipeline": 2, "expert": 2}, MOE),
}

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""


def scored(case: Case) -> tuple[list[TokenScores], list[TokenScores], bool, tuple[int, int]]:
    """Scores of this rank's samples under the reference and the current policy, after one step.

    And whether the passes changed a bit of the current policy; and this rank's share of the samples.
    """
    parallel = ParallelConfig(**case.layout)
    divide_world(parallel)
    share = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = random_samples(LENGTHS, temperatures=TEMPERATURE)[share[0] :: share[1]]
    policy, reference = (tiny_model(**dict(case.model), seed=seed) for seed in (0, 1))
    trainer = Trainer(policy.config, hf_state(policy), OPTIMIZER, parallel=parallel)
    trainer.frozen.load("reference", policy.config, hf_state(reference), Path("elsewhere"))
    trainer.train_step(pack(samples, 56), TIS, policy_version=3)
    trainer.frozen.hold("now")
    reference_scores, current_scores = (
        score(trainer, samples, policy=tag, tokens_per_micro_batch=64) for tag in ("reference", None)
    )
    before, after = (
        trainer.frozen.weights("now"),
        [dict(chunk.named_parameters()) for chunk in trainer.chunks],
    )
    moved = not all(
        torch.equal(chunk[name], now[name]) for chunk, now in zip(before, after, strict=True) for name in now
    )
    return reference_scores, current_scores, moved, share


def expected_scores(policy, samples) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropy of all tokens but the first of each sample, by transformers."""
    found, start = [], 0
    with torch.no_grad():
        logits = reference_logits(policy, samples)
    for sample in samples:
        end = start + len(sample.token_ids)
        distribution = torch.log_softmax(logits[start : end - 1] / TEMPERATURE, dim=-1)
        labels = torch.from_numpy(sample.token_ids[1:]).long()[:, None]
        found.append((distribution.gather(-1, labels)[:, 0], -(distribution.exp() * distribution).sum(-1)))
        start = end
    return found


def assert_close(found: list[TokenScores], policy, samples) -> None:
    for scores, sample, expected in zip(found, samples, expected_scores(policy, samples), strict=True):
        mask = sample.loss_mask[1:]
        for ours, theirs in zip((scores.logprobs, scores.entropy), expected, strict=True):
            assert ours.dtype == np.float32
            assert np.abs(ours[1:] - theirs.numpy())[mask].max(initial=0) < 1e-5
            assert np.isnan(ours[0])
            assert np.isnan(ours[1:][~mask]).all()


@cache
def alone(
    model: tuple[tuple[str, object], ...],
) -> tuple[list[TokenScores], list[TokenScores], bool, tuple[int, int]]:
    """Train on one rank, that of this process."""
    return scored(Case(1, {}, model))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logprobs_of_a_reference_are_those_of_transformers(family):
    found, _, moved, _ = alone((("family", family),))
    assert_close(found, tiny_model(family, seed=1), random_samples(LENGTHS))
    assert not moved


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_on_any_layout_every_rank_has_those_of_its_samples(worlds, name):
    case = CASES[name]
    answers = worlds.run(case.ranks, scored, case)
    reference, one = tiny_model(**dict(case.model), seed=1), alone(case.model)
    for found, current, moved, (share, shares) in answers:
        assert_close(found, reference, random_samples(LENGTHS, temperatures=TEMPERATURE)[share::shares])
        for ours, theirs in zip(current, one[1][share::shares], strict=True):
            assert np.allclose(ours.logprobs, theirs.logprobs, atol=2e-5, equal_nan=True)
        assert not moved


def trainer_of(**settings) -> Trainer:
    policy = tiny_model()
    return Trainer(policy.config, hf_state(policy), OptimizerConfig(lr=1e-3), **settings)


def test_the_probe_of_a_version_is_scored_as_transformers_does():
    trainer, policy = trainer_of(), tiny_model()
    probe = scored_probe(trainer)
    tokens = torch.tensor(probe.token_ids)
    assert tokens.shape == (4, 32)
    with torch.no_grad():
        expected = policy(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    assert np.abs(np.array(probe.logprobs) - expected.numpy()).max() < 1e-5
    probe.check()
    trainer.train_step(pack(random_samples(LENGTHS), 64), TIS, policy_version=0)
    later = scored_probe(trainer)
    assert later.token_ids == probe.token_ids, "versions are compared on the same tokens"
    assert later.logprobs != probe.logprobs


def test_a_pass_packs_by_its_own_budget(monkeypatch):
    trainer, packs, shares = trainer_of(), [], Trainer.shares
    monkeypatch.setattr(
        Trainer, "shares", lambda self, batches: packs.extend(batches) or shares(self, batches)
    )
    samples = random_samples(LENGTHS)
    wide = score(trainer, samples, tokens_per_micro_batch=64)
    assert [batch.lengths for batch in packs] == [(5, 17, 2, 32, 3), (9, 20, 20)]
    packs.clear()
    narrow = score(trainer, samples, tokens_per_micro_batch=20)
    assert [batch.lengths for batch in packs] == [(5, 2, 9, 3), (17,), (32,), (20,), (20,)]
    for one, other in zip(wide, narrow, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-6, equal_nan=True)


def test_a_pass_keeps_nothing_for_a_backward_pass_and_takes_logits_in_chunks(monkeypatch):
    trainer, rows, softmax_sums = trainer_of(), [], head.softmax_sums
    monkeypatch.setattr(
        head, "softmax_sums", lambda logits, scale: rows.append(len(logits)) or softmax_sums(logits, scale)
    )
    samples = random_samples([200, 250, 220, 180])
    whole = score(trainer, samples, tokens_per_micro_batch=1000)
    trained = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    assert sum(rows) == trained
    rows.clear()
    monkeypatch.setattr(policy_output, "LOGITS_BYTES", 300 * 4 * trainer.hf_config.vocab_size)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        chunked = score(trainer, samples, tokens_per_micro_batch=1000)
    assert max(rows) == 300
    assert len(rows) == math.ceil(trained / 300)
    assert not saved
    for one, other in zip(whole, chunked, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-6, equal_nan=True)


def test_no_samples_give_no_scores():
    assert score(trainer_of(), [], tokens_per_micro_batch=20) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_policy_is_bit_for_bit_itself_after_a_switch_that_failed(dtype):
    trainer = trainer_of(dtype=dtype)
    other = tiny_model(seed=1)
    trainer.frozen.load("reference", other.config, hf_state(other), Path("elsewhere"))
    before = trainer.export()

    def fail():
        with trainer.frozen.in_place("reference"):
            found = trainer.export()
            assert all(torch.equal(found[name], hf_state(other)[name].to(dtype)) for name in found)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    after = trainer.export()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tag_that_is_held_again_follows_the_policy():
    trainer = trainer_of()
    trainer.frozen.hold("reference")
    first = trainer.export()
    trainer.train_step(pack(random_samples(LENGTHS), 64), TIS, policy_version=3)
    with trainer.frozen.in_place("reference"):
        assert all(torch.equal(first[name], found) for name, found in trainer.export().items())
    trainer.frozen.hold("reference")
    now = trainer.export()
    with trainer.frozen.in_place("reference"):
        assert all(torch.equal(now[name], found) for name, found in trainer.export().items())
    assert any(not torch.equal(first[name], now[name]) for name in now)


@pytest.mark.parametrize(("context", "length"), [(4096, 32), (39, 32), (32, 25), (4, 2)])
def test_the_probe_is_no_longer_than_what_servers_score_in_a_small_context(context, length):
    tokens = probe_tokens(Qwen3Config(vocab_size=40, max_position_embeddings=context))
    assert tokens.shape == (4, length)
