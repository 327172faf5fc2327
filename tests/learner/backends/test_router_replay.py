"""Tokens go to the experts that a trajectory names, in every layout of ranks, as in transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.backends.factory import refuse_router_replay
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.model.router_replay import RouterExperts
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import OWN_CHOICE, pack
from tests.learner.backends.router_reference import chosen_experts, given, sent_to
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_config, tiny_model

LENGTHS = [5, 17, 2, 32, 9, 20]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, eps=1e-4)
SHARED = {"num_hidden_layers": 3, "decoder_sparse_step": 2}
"""The second of three layers alone has experts."""
LAYOUTS = {
    "cp2": {"context": 2},
    "cp2 short whole": {"context": 2, "context_min_tokens": 18},
    "pp2": {"pipeline": 2},
    "tp2 sp ep2 recomputed": {"tensor": 2, "sequence": True, "expert": 2, "recompute": "full"},
}
DIVIDED = [("qwen3_moe", layout) for layout in LAYOUTS]
DELTA_NET = ("qwen3_next", "cp2 short whole")


def expected_steps(family, changes):
    model = tiny_model(family, **changes)
    optimizer, found = reference_optimizer(model, OPTIMIZER), []
    for step in range(2):
        samples = given(random_samples(LENGTHS, seed=step), model, step)
        with sent_to(model, samples):
            found.append(reference_step(model, optimizer, samples, loss="tis", lr=OPTIMIZER.lr))
    return found, hf_state(model)


def train(family, changes, layout):
    divide_world(ParallelConfig(**layout))
    model = tiny_model(family, **changes)
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=ParallelConfig(**layout))
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    results = []
    for step in range(2):
        samples = given(random_samples(LENGTHS, seed=step), model, step)[rank::ranks]
        results.append(trainer.train_step(pack(samples, 40), TIS, policy_version=3))
    return [(result.loss, result.grad_norm) for result in results], trainer.export()


def assert_trained_like(found, weights, family, changes):
    steps, expected = expected_steps(family, changes)
    np.testing.assert_allclose(found, steps, atol=2e-5)
    for name, weight in weights.items():
        assert (weight - expected[name]).abs().max() < 1e-5, name


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        pytest.param("mixtral", {}, marks=pytest.mark.nightly),
        ("qwen2_moe", SHARED),
        pytest.param("glm4_moe", {}, marks=pytest.mark.nightly),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("qwen3_next", {"num_experts_per_tok": 2}),
        pytest.param("qwen3_5_moe_text", {}, marks=pytest.mark.slow),
    ],
)
def test_steps_with_given_experts_are_those_of_transformers(family, changes):
    found, weights = train(family, changes, {})
    assert_trained_like(found, weights, family, changes)
    own = [reference_step(m, reference_optimizer(m, OPTIMIZER), random_samples(LENGTHS), loss="tis", lr=0.0)
           for m in [tiny_model(family, **changes)]]  # fmt: skip
    # experts drawn by chance are others than the router's; where they are the same, losses differ by 1e-5
    assert abs(own[0][0] - found[0][0]) > 5e-4


def noted(family, changes, layout, share_prefixes=False):
    """Where a pass sends the tokens of some samples, and their log-probs, on every rank."""
    divide_world(ParallelConfig(**layout))
    model = tiny_model(family, **changes)
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=ParallelConfig(**layout))
    batches = pack(alike(), 70, share_prefixes=share_prefixes)
    assert any(batch.computed_tokens < len(batch.tokens) for batch in batches) is share_prefixes
    passed = trainer.routed_logprobs(batches)
    assert all(
        values.nan_to_num().equal(plain.nan_to_num())
        for (values, _), plain in zip(passed, trainer.logprobs(batches), strict=True)
    )
    return [
        (batch.tokens, batch.lengths, experts) for batch, (_, experts) in zip(batches, passed, strict=True)
    ]


def alike():
    """Samples of which the two longest begin with the same 40 tokens, as those of one prompt do."""
    samples = random_samples([5, 17, 50, 9, 45], seed=5)
    begin = samples[2].token_ids[:40]
    samples[4] = replace(samples[4], token_ids=np.append(begin, samples[4].token_ids[40:]))
    return samples


def assert_noted_as_transformers_chooses(found, family, changes):
    model = tiny_model(family, **changes)
    for tokens, lengths, experts in found:
        for sequence, own in zip(tokens.split(lengths), experts.split(lengths), strict=True):
            expected = chosen_experts(model, sequence.tolist(), dense=OWN_CHOICE)
            # which of its experts a token has first says nothing: transformers leaves it open
            assert own.sort().values.tolist() == expected.sort().values.tolist()


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize(
    ("family", "changes", "share_prefixes"),
    [
        ("qwen3_moe", {}, False),
        ("mixtral", {}, True),
        ("qwen2_moe", SHARED, False),
        ("deepseek_v3", {}, True),
        ("gpt_oss", {}, False),
        ("qwen3_next", {}, False),
    ],
)
def test_a_pass_notes_where_it_sends_tokens(family, changes, share_prefixes):
    found = noted(family, changes, {}, share_prefixes=share_prefixes)
    assert_noted_as_transformers_chooses(found, family, changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"), [*DIVIDED, pytest.param(*DELTA_NET, marks=pytest.mark.nightly)]
)
def test_ranks_that_share_a_model_all_know_where_a_pass_sends_tokens(worlds, family, layout):
    shared = family == "qwen3_moe" and not {"pipeline", "context_min_tokens"} & LAYOUTS[layout].keys()
    for found in worlds.run(2, noted, family, {}, LAYOUTS[layout], shared):
        assert_noted_as_transformers_chooses(found, family, {})


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [*DIVIDED, DELTA_NET])
def test_ranks_that_share_a_model_send_tokens_to_the_given_experts(worlds, family, layout):
    [(found, weights), *_] = worlds.run(2, train, family, {}, LAYOUTS[layout])
    assert_trained_like(found, weights, family, {})


def test_what_an_engine_cannot_have_meant_is_left_to_the_router():
    scores = torch.tensor([[0.1, 0.5, 0.3, 0.2]] * 5)
    layer = RouterExperts()
    beyond = int(np.uint16(40_000).astype(np.int16))  # a trajectory has uint16, a pack int16
    layer.experts = torch.tensor([[3, 0], [2, 2], [1, 9], [OWN_CHOICE, OWN_CHOICE], [beyond, 0]])
    values, chosen = layer.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
    assert chosen.tolist() == [[3, 0], [1, 2], [1, 2], [1, 2], [1, 2]]
    assert values.tolist() == scores.gather(1, chosen).tolist()
    assert layer.counts.tolist() == [5, 1, 1]
    layer.experts = torch.tensor([[2, 1]] * 5)  # the same ones, in another order
    layer.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
    assert layer.counts.tolist() == [10, 6, 1]


def test_a_model_without_experts_is_refused_at_the_start():
    refuse_router_replay(LearnerConfig(), tiny_config())
    refuse_router_replay(LearnerConfig(router_replay="engine"), tiny_config("mixtral"))
    with pytest.raises(ConfigError, match="router_replay=learner: the model, a qwen3, has no experts"):
        refuse_router_replay(LearnerConfig(router_replay="learner"), tiny_config())


def test_of_common_prefixes_each_token_goes_where_the_first_that_has_it_names():
    model = tiny_model("qwen3_moe")
    divide_world(ParallelConfig())
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER)
    first, other = (given(alike(), model, 7)[i] for i in (2, 4))
    other = replace(other, experts=np.concatenate((first.experts[:40], other.experts[40:])))
    losses = [
        trainer.logprobs(pack([first, other], 200, share_prefixes=shared))[0].nan_to_num()
        for shared in (False, True)
    ]
    assert (losses[0] - losses[1]).abs().max() < 1e-5
    own = trainer.logprobs(pack([replace(s, experts=None) for s in (first, other)], 200))[0].nan_to_num()
    assert (losses[0] - own).abs().max() > 1e-3
