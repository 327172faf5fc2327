"""Tokens go to the experts that a trajectory names, as in transformers and on Megatron."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bus.errors import ConfigError
from learner.algorithms.losses.objective import Objective
from learner.backends.factory import refuse_router_replay
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.correction import TokenTIS
from learner.config.learner import LearnerConfig
from learner.config.loss import ReinforceLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import OWN_CHOICE, pack
from storage.model_files import families
from tests.learner.backends.fsdp.families import FAMILIES, family_config, family_model
from tests.learner.backends.router_reference import chosen_experts, given, sent_to
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_config, tiny_model

pytestmark = pytest.mark.slow

LENGTHS = [5, 17, 2, 32, 9, 20]
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=0, weight_decay=0.1, eps=1e-4)
REPLAYING = Objective(ReinforceLoss(), TokenTIS(), replays_routing=True)
BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}
SHARED = {"num_hidden_layers": 3, "decoder_sparse_step": 2}
"""The second of three layers alone has experts."""
MIXTURES = {
    "qwen3_moe": {}, "mixtral": {}, "qwen2_moe": SHARED, "glm4_moe": {}, "deepseek_v3": {}, "gpt_oss": {},
    "lfm2_moe": {}, "qwen3_next": {}, "qwen3_5_moe": {},
}  # fmt: skip


def model_of(family: str):
    changes = MIXTURES[family]
    return family_model(family) if family in FAMILIES else tiny_model(family, **changes)


def steps_of(backend: str, family: str, parallel: ParallelConfig = UNDIVIDED, *, names_experts: bool = True):
    """Return loss and gradient norm of each step, what the last says of replay, and the weights."""
    if backend == "megatron":
        divide_world(parallel)
    model = model_of(family)
    trainer = BACKENDS[backend](model.config, hf_state(model), OPTIMIZER, parallel=parallel)
    steps = []
    for step in range(2):
        samples = random_samples(LENGTHS, seed=step)
        samples = given(samples, model, step) if names_experts else samples
        mine = pack(samples[dist.get_rank() :: dist.get_world_size()], 40)
        result = trainer.train_step(mine, REPLAYING, policy_version=3)
        steps.append((result.loss, result.grad_norm))
    figures = {name: value for name, value in result.diagnostics.items() if name.startswith("router_")}
    return steps, figures, {name: tensor.numpy() for name, tensor in trainer.export().items()}


def assert_same(found, expected):
    (steps, figures, weights), (wanted_steps, wanted_figures, wanted) = found, expected
    for ours, theirs in zip(steps, wanted_steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert figures == pytest.approx(wanted_figures)
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert np.abs(weights[name] - weight).max() < 1e-5, name


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("family", MIXTURES)
def test_steps_with_given_experts_are_those_of_transformers_and_others_than_without(family):
    steps, figures, weights = steps_of("fsdp", family)
    model = model_of(family)
    optimizer, wanted = reference_optimizer(model, OPTIMIZER), []
    for step in range(2):
        samples = given(random_samples(LENGTHS, seed=step), model, step)
        with sent_to(model, samples):
            wanted.append(reference_step(model, optimizer, samples, loss="tis", lr=OPTIMIZER.lr))
    state = hf_state(model)
    assert_same((steps, figures, weights), (wanted, figures, {n: state[n].numpy() for n in weights}))
    assert figures["router_replayed_fraction"] > 0.5
    own, nothing, _ = steps_of("fsdp", family, names_experts=False)
    assert abs(own[0][0] - steps[0][0]) > 1e-3  # experts drawn by chance are others than the router's
    assert nothing == {}


def test_each_step_is_megatrons_also_where_layers_are_computed_again():
    expected = steps_of("megatron", "qwen3_moe")
    assert_same(steps_of("fsdp", "qwen3_moe", ParallelConfig(recompute="full")), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_each_step_is_megatrons(family):
    assert_same(steps_of("fsdp", family), steps_of("megatron", family))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_each_step_of_two_ranks_is_megatrons(worlds, family):
    ours, theirs = (worlds.run(2, steps_of, backend, family)[0] for backend in ("fsdp", "megatron"))
    assert_same(ours, theirs)


@pytest.mark.first(3, others=pytest.mark.nightly)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_pass_notes_where_it_sends_tokens_and_a_step_sends_them_there(family):
    model = model_of(family)
    trainer = FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    samples = random_samples([5, 17, 50, 9])
    batches = pack(samples, 60)
    passed = trainer.routed_logprobs(batches)
    for batch, (values, experts), plain in zip(batches, passed, trainer.logprobs(batches), strict=True):
        assert values.nan_to_num().equal(plain.nan_to_num())
        assert experts.dtype == torch.int16
        for sequence, own in zip(
            batch.tokens.split(batch.lengths), experts.split(batch.lengths), strict=True
        ):
            expected = chosen_experts(model, sequence.tolist(), dense=OWN_CHOICE)
            assert own.sort().values.tolist() == expected.sort().values.tolist()
    batches = [replace(batch, experts=experts) for batch, (_, experts) in zip(batches, passed, strict=True)]
    result = trainer.train_step(batches, REPLAYING, policy_version=3)
    assert result.diagnostics["router_replayed_fraction"] == 1.0
    assert result.diagnostics["router_changed_fraction"] == 0.0
    again = FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    alone = again.train_step(pack(samples, 60), TIS, policy_version=3)
    assert (result.loss, result.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-5)


def test_routers_that_are_unknown_and_models_without_are_refused_by_name():
    fsdp = LearnerConfig(backend="fsdp", router_replay="engine")
    for known in ("qwen3_next", "gpt_oss"):
        refuse_router_replay(fsdp, family_config(known))
    refuse_router_replay(LearnerConfig(backend="fsdp"), tiny_config())
    with pytest.raises(ConfigError, match="router_replay=engine: the model, a qwen3, has no routers that"):
        refuse_router_replay(fsdp, tiny_config())


def test_routers_that_weigh_otherwise_than_replay_are_refused_at_the_start(monkeypatch):
    model = tiny_model("qwen3_moe")
    known = families.FAMILIES["qwen3_moe"]
    other = known.router._replace(weigh="learner.backends.fsdp.router_replay:by_softmax_of_chosen")
    monkeypatch.setitem(families.FAMILIES, "qwen3_moe", replace(known, router=other))
    FsdpTrainer(model.config, hf_state(model), OPTIMIZER)  # normalised, they are the same
    model.config.norm_topk_prob = False
    with pytest.raises(ConfigError, match="its routers weigh experts otherwise than router replay"):
        FsdpTrainer(model.config, hf_state(model), OPTIMIZER)


def test_experts_of_another_model_are_refused():
    model = tiny_model("qwen3_moe")
    trainer = FsdpTrainer(model.config, hf_state(model), OPTIMIZER)
    samples = given(random_samples(LENGTHS), tiny_model("mixtral"))
    with pytest.raises(ConfigError, match="name 2 experts a token in 2 layers, the model has 3 in 2"):
        trainer.train_step(pack(samples, 40), REPLAYING, policy_version=3)
    dense = tiny_model()
    trainer = FsdpTrainer(dense.config, hf_state(dense), OPTIMIZER)
    with pytest.raises(ConfigError, match="knows no routers of this model"):
        trainer.train_step(pack(samples, 40), REPLAYING, policy_version=3)
