"""With model.numerics=exact the learner gives each token the log-prob that the embedded engine recorded.

Each test compares bits: a prompt that the engine computes at once, tokens that it decodes beside others that
come and go, and packs of any composition in the learner.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engines.embedded.decoder import BatchedDecoder
from actors.engines.embedded.prepared_weights import prepare_weights
from actors.weights.received import torch_tensors
from bus.errors import ConfigError
from learner.backends.contract.backend import Backend
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.backends.output import policy_output
from learner.backends.quantised.rounding import Rounding
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import pack
from learner.host_memory.copies import host_tensors
from learner.logprobs.logprobs import score
from storage.disk.checkpoints import latest
from storage.weights.quantisation import FORMATS
from storage.weights.quantised_tensors import quantised
from tests.learner.exact import decoder_of, differences, finished, random_requests, shuffled, trained_sample
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

pytestmark = pytest.mark.slow

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
BACKENDS = {"fsdp": FsdpTrainer, "megatron": Trainer}


def learner_of(backend: str, family: str, state: Mapping[str, Tensor] | None = None, **settings: object):
    model = tiny_model(family, tied=family == "qwen3")
    return BACKENDS[backend](
        model.config, hf_state(model) if state is None else state, OPTIMIZER, **{"exact": True} | settings
    )


def take(decoder: BatchedDecoder, learner: Backend, version: int) -> None:
    """Give an engine the learner's weights."""
    complete = decoder.policy_version < 0
    weights = prepare_weights(decoder.model, learner.export(), complete=complete)
    decoder.swap_weights(weights, version)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_batch_of_the_engine_and_any_pack_of_the_learner_agree_to_the_bit(backend, family):
    learner = learner_of(backend, family)
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 0)
    sampled = finished(decoder, random_requests(8, seed=1))
    for seed, budget in ((0, 1), (1, 130), (2, 5000)):
        assert not differences(learner, shuffled(sampled, seed), 0, budget).any(), f"budget {budget}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_exact_arithmetic_they_do_not(backend):
    learner = learner_of(backend, "qwen3", exact=False)
    decoder = decoder_of(learner.hf_config, exact=False)
    take(decoder, learner, 0)
    found = differences(learner, finished(decoder, random_requests(6, seed=1)), 0, 130)
    assert 0 < found.mean() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_token_agrees_with_the_version_that_sampled_it_also_when_weights_come_in_mid_answer(backend):
    learner = learner_of(backend, "qwen3")
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 0)
    decoder.submit(random_requests(12, seed=2))
    weights, sampled = [learner.export()], []
    while decoder.busy:
        sampled += decoder.step()
        if len(sampled) > 3 * len(weights):
            learner.train_step(pack(random_samples([40, 17]), 100), TIS, policy_version=0)
            weights.append(learner.export())
            take(decoder, learner, len(weights) - 1)
    mixed = [generation for _, generation in sampled if len(set(generation.policy_versions.tolist())) > 1]
    assert len(weights) > 3
    assert mixed
    for version, state in enumerate(weights):
        found = differences(learner_of(backend, "qwen3", state), sampled, version, 200)
        assert len(found)
        assert not found.any(), f"version {version}"


@pytest.mark.parametrize(
    ("backend", "name"),
    [("megatron", "fp8_block"), ("fsdp", "int4"), ("megatron", "int4"), ("fsdp", "fp8_block")],
)
def test_a_quantised_engine_and_a_learner_that_rounds_its_weights_agree_to_the_bit(backend, name):
    model = tiny_model(hidden_size=128, intermediate_size=256, head_dim=32)
    learner = BACKENDS[backend](model.config, hf_state(model), OPTIMIZER, exact=True)
    decoder = decoder_of(learner.hf_config)
    for version, aware in enumerate((False, True, True)):
        if aware:
            learner.compute_with(Rounding(FORMATS[name], torch.float32))
            learner.train_step(pack(random_samples([40, 17]), 100), TIS, policy_version=version)
        codes = torch_tensors(quantised(host_tensors(learner.export()), FORMATS[name]))
        decoder.swap_weights(prepare_weights(decoder.model, codes, complete=version == 0), version)
        sampled = finished(decoder, random_requests(4, seed=version))
        assert differences(learner, sampled, version, 200).any() != aware


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_within_kept_sets_agree_to_the_bit(backend):
    learner = learner_of(backend, "qwen3")
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 0)
    sampled = finished(decoder, random_requests(5, seed=3, top_p=0.8, keep_masks=True))
    assert all(generation.kept is not None for _, generation in sampled)
    assert not differences(learner, sampled, 0, 200).any()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_itself_sees_a_mismatch_of_exactly_zero(backend, recompute, monkeypatch):
    learner = learner_of(backend, "qwen3", parallel=ParallelConfig(recompute=recompute))
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 0)
    samples = [trained_sample(*each) for each in finished(decoder, random_requests(5, seed=4))]
    monkeypatch.setattr(policy_output, "LOGITS_BYTES", 0)
    monkeypatch.setattr(policy_output, "LEAST_ROWS", 9)  # several chunks of the output layer
    result = learner.train_step(pack(samples, 150), TIS, policy_version=0)
    assert result.diagnostics["mismatch_nats"] == 0.0
    assert result.diagnostics["importance_ratio"] == 1.0
    assert result.grad_norm > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_learner_agrees_to_the_bit(backend, tmp_path: Path):
    learner = learner_of(backend, "llama")
    learner.train_step(pack(random_samples([30, 9]), 100), TIS, policy_version=0)
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 1)
    sampled = finished(decoder, random_requests(3, seed=5))
    save_checkpoint(learner, tmp_path, 1, {}, keep=1)
    resumed = learner_of(backend, "llama")
    load_checkpoint(resumed, latest(tmp_path))
    assert not differences(resumed, sampled, 1, 90).any()
    steps = [
        each.train_step(pack(random_samples([25, 12], seed=1), 100), TIS, policy_version=1)
        for each in (learner, resumed)
    ]
    assert steps[0].grad_norm == steps[1].grad_norm
    take(decoder, learner, 2)
    assert not differences(resumed, finished(decoder, random_requests(3, seed=6)), 2, 90).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_as_ordinary_arithmetic_does(backend):
    exact, ordinary = (learner_of(backend, "qwen3", exact=each) for each in (True, False))
    for step in range(2):
        batch = pack(random_samples([5, 17, 2, 32, 9], seed=step), 40)
        ours, theirs = (each.train_step(batch, TIS, policy_version=3) for each in (exact, ordinary))
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    for name, weight in ordinary.export().items():
        assert (exact.export()[name] - weight).abs().max() < 1e-4, name


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["megatron", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_two_threads_give_the_same_bits(backend):
    learner = learner_of(backend, "qwen3")
    decoder = decoder_of(learner.hf_config)
    take(decoder, learner, 0)
    torch.set_num_threads(2)
    try:
        sampled = finished(decoder, random_requests(2, seed=7))
    finally:
        torch.set_num_threads(1)
    assert sampled
    assert not differences(learner, sampled, 0, 400).any()


def logprobs_on_each_rank(backend: str) -> np.ndarray:
    """Log-probs of the same samples on every rank."""
    found = score(learner_of(backend, "llama"), random_samples([30, 9, 21, 4]), tokens_per_micro_batch=40)
    return np.concatenate([each.logprobs for each in found])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_share_weights_give_the_same_bits(worlds, backend):
    alone = logprobs_on_each_rank(backend)
    for shared in worlds.run(2, logprobs_on_each_rank, backend):
        assert np.array_equal(alone, shared, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_with_another_activation_is_refused(backend):
    with pytest.raises(ConfigError, match=r"exact (does not know .*gelu|does not have)|sliding window"):
        learner_of(backend, "gemma3_text")
