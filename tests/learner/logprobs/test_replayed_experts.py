"""The learner sends tokens to the experts that the engine chose, as stored trajectories say."""

import copy
from dataclasses import replace

import pytest

from actors.engines.base import Sampling
from bus.errors import ConfigError
from bus.trajectory import Trajectory
from learner.backends.megatron.trainer import Trainer
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.step.rl_step import train_on
from tests.learner.division import divide_world
from tests.learner.stored_rollouts import stored_rollouts
from tests.learner.tiny import hf_state, tiny_model

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=24)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe", num_hidden_layers=4)


@pytest.fixture(scope="module")
def stored(model, tmp_path_factory) -> list[Trajectory]:
    """Trajectories of an engine that computes in bfloat16."""
    engines = copy.deepcopy(model).bfloat16()
    directory = tmp_path_factory.mktemp("store")
    return stored_rollouts(engines, directory, [SAMPLING] * 4, context=9, routed_experts=True)


def figures(model, groups, lr=1e-4, **settings):
    """What a step of a learner that computes in float32 says, and the digest of its batch."""
    divide_world(ParallelConfig())
    state = {name: tensor.bfloat16().float() for name, tensor in hf_state(model).items()}
    trainer = Trainer(model.config, state, OptimizerConfig(lr=lr, warmup_steps=0))
    learner = LearnerConfig(**settings)
    batch, result = train_on(trainer, groups, [1.0], learner, step=1, policy_version=3)
    return result.diagnostics, batch.xxh3()


def test_replay_takes_away_what_other_experts_add_to_the_mismatch(model, stored):
    own, own_digest = figures(model, [stored])
    replayed, digest = figures(model, [stored], router_replay="engine")
    assert 0 < replayed["router_changed_fraction"] < 0.5
    assert replayed["mismatch_nats"] < own["mismatch_nats"]
    assert "router_changed_fraction" not in own
    assert digest != own_digest  # the experts are part of what is trained on


def test_a_trajectory_without_experts_is_routed_by_the_learner(model, stored):
    bare = [replace(t, routed_experts=b"", moe_layers=0, experts_per_token=0) for t in stored]
    without, _ = figures(model, [bare])
    asked, _ = figures(model, [bare], router_replay="engine")
    assert asked == without
    mixed, _ = figures(model, [[stored[0], bare[1]]], router_replay="engine")
    assert mixed["router_changed_fraction"] > 0


def test_experts_of_another_model_are_refused(model, stored):
    other = tiny_model("qwen3_moe", num_hidden_layers=3)
    with pytest.raises(ConfigError, match="3 experts a token in 4 layers, the model has 3 in 3"):
        figures(other, [stored], router_replay="engine")


def test_a_reference_chooses_its_own_experts(model, stored):
    """The reference is the policy, so that nothing but their experts tells their log-probs apart."""
    distances = []
    for replay in ("none", "engine"):
        divide_world(ParallelConfig())
        trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-4))
        trainer.frozen.hold("reference")
        learner = LearnerConfig(router_replay=replay, reference={"kl_coef": 0.1, "kl_in": "loss"})
        _, result = train_on(trainer, [stored], [1.0], learner, step=1, policy_version=3)
        distances.append(result.diagnostics["reference_k3_nats"])
    assert distances[0] < 1e-9 < 1e-6 < distances[1]


def test_all_updates_of_a_step_send_tokens_where_its_first_pass_did(model, stored):
    """The first update changes the router, which would send tokens elsewhere in the second one."""
    settings = {"batch": {"updates": 2}, "loss": {"type": "ppo_clip", "centre": "proximal"}}
    found, digest = figures(model, [stored], lr=0.02, router_replay="learner", **settings)
    assert 0 < found["router_changed_fraction"] < 0.6
    plain, plain_digest = figures(model, [stored], lr=0.02, **settings)
    assert digest == plain_digest  # where a pass sends tokens is nothing that was recorded
    assert found["proximal_k1_nats"] != plain["proximal_k1_nats"]
    alone, _ = figures(model, [stored], router_replay="learner")
    assert alone["router_changed_fraction"] == 0.0
