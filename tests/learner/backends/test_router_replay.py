"""Tokens go to the experts that a trajectory names, in every layout of ranks, as in transformers."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from learner.backends.megatron.core import parallel_state
from learner.backends.megatron.model.router_replay import GivenExperts
from learner.backends.megatron.process_groups import divide_world
from learner.backends.megatron.trainer import Trainer
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import OWN_CHOICE, pack
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, eps=1e-4)
SHARED = {"num_hidden_layers": 3, "decoder_sparse_step": 2}
"""The second of three layers alone has experts."""
LAYOUTS = {
    "cp2": {"context": 2},
    "pp2": {"pipeline": 2},
    "tp2 sp ep2 recomputed": {"tensor": 2, "sequence": True, "expert": 2, "recompute": "full"},
}


def given(samples, model, seed=0):
    """Samples whose tokens are to go to experts drawn by chance; the second sample names none."""
    config, rng = model.config, np.random.default_rng(seed)
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return [
        replace(
            sample,
            experts=rng.random((len(sample.token_ids) - 1, config.num_hidden_layers, count))
            .argsort(-1)[..., : config.num_experts_per_tok]
            .astype(np.uint8),
        )
        if i != 1
        else sample
        for i, sample in enumerate(samples)
    ]


@contextmanager
def sent_to(model, samples):
    """Have transformers send the tokens of one sample after the other where the samples say."""
    layers = [
        (number, layer.mlp.gate)
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]

    def hook(number):
        order = iter(samples)

        def send(router, inputs, outputs):
            logits, _, chosen = outputs
            sample = next(order)
            experts = chosen.clone()
            if sample.experts is not None:
                experts[:-1] = torch.from_numpy(sample.experts[:, number].astype(np.int64))
            scores = F.softmax(logits.float(), -1).gather(1, experts)
            if getattr(router, "norm_topk_prob", True):
                scores = scores / scores.sum(-1, keepdim=True)
            return logits, scores, experts

        return send

    handles = [router.register_forward_hook(hook(number)) for number, router in layers]
    yield
    for handle in handles:
        handle.remove()


def expected_steps(family, changes):
    model = tiny_model(family, **changes)
    optimizer, found = reference_optimizer(model, OPTIMIZER), []
    for step in range(2):
        samples = given(random_samples(LENGTHS, seed=step), model, step)
        with sent_to(model, samples):
            found.append(reference_step(model, optimizer, samples, loss="tis", lr=OPTIMIZER.lr))
    return found, hf_state(model)


def train(family, changes, layout, *, share_prefixes=False):
    divide_world(ParallelConfig(**layout))
    model = tiny_model(family, **changes)
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=ParallelConfig(**layout))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    results = []
    for step in range(2):
        samples = given(random_samples(LENGTHS, seed=step), model, step)[rank::ranks]
        results.append(
            trainer.train_step(pack(samples, 40, share_prefixes=share_prefixes), TIS, policy_version=3)
        )
    return [(result.loss, result.grad_norm) for result in results], trainer.export()


def assert_trained_like(found, weights, family, changes):
    steps, expected = expected_steps(family, changes)
    np.testing.assert_allclose(found, steps, atol=2e-5)
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("family", "changes", "share_prefixes"),
    [("qwen3_moe", {}, False), ("mixtral", {}, True), ("qwen2_moe", SHARED, False)],
)
def test_steps_with_given_experts_are_those_of_transformers(family, changes, share_prefixes):
    found, weights = train(family, changes, {}, share_prefixes=share_prefixes)
    assert_trained_like(found, weights, family, changes)
    own = [reference_step(m, reference_optimizer(m, OPTIMIZER), random_samples(LENGTHS), loss="tis", lr=0.0)
           for m in [tiny_model(family, **changes)]]  # fmt: skip
    assert abs(own[0][0] - found[0][0]) > 1e-3  # experts drawn by chance are others than the router's


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_model_send_tokens_to_the_given_experts(worlds, layout):
    [(found, weights), *_] = worlds.run(2, train, "qwen3_moe", {}, LAYOUTS[layout])
    assert_trained_like(found, weights, "qwen3_moe", {})


def test_what_an_engine_cannot_have_meant_is_left_to_the_router():
    scores = torch.tensor([[0.1, 0.5, 0.3, 0.2]] * 4)
    layer = GivenExperts()
    layer.experts = torch.tensor([[3, 0], [2, 2], [1, 9], [OWN_CHOICE, OWN_CHOICE]])
    values, chosen = layer.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
    assert chosen.tolist() == [[3, 0], [1, 2], [1, 2], [1, 2]]
    assert values.tolist() == scores.gather(1, chosen).tolist()
    assert layer.counts.tolist() == [1, 1]
    layer.experts = torch.tensor([[2, 1]] * 4)  # the same ones, in another order
    layer.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
    assert layer.counts.tolist() == [5, 1]
