"""An update that leaves out trajectories without an advantage ends with the weights of one on all of them."""

from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from bus.trajectory import Trajectory
from learner.algorithms.losses.objective import Objective
from learner.backends.contract.backend import StepResult
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.trainer import Trainer
from learner.config.algorithm import EntropyTargetConfig, SequenceMean
from learner.config.batch import BatchConfig
from learner.config.correction import SequenceTIS
from learner.config.frozen_policies import ReferenceConfig, TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import GSPOLoss, KLCovLoss, PluginLoss, PPOClipLoss, RegressionLoss
from learner.config.mtp import MtpConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.metrics.step_metrics import step_values
from learner.step.rl_step import train_on
from tests.learner.algorithms.loss_inputs import leaf, tokens_of, worked_out
from tests.learner.backends.shared_prefixes import behind
from tests.learner.choices import LOSSES
from tests.learner.division import divide_world
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.ranks_worker import group

BACKENDS = {"megatron": Trainer, "fsdp": FsdpTrainer}
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
"""Optimizer with an eps that keeps rounding errors of gradients near 0 from becoming whole updates."""
SETTINGS = {
    "token TIS": {},
    "PPO in two updates": {
        "loss": PPOClipLoss(centre="proximal"), "aggregation": SequenceMean(), "updates": 2
    },
    "GSPO": {"loss": GSPOLoss()},
    "sequence TIS": {"correction": SequenceTIS()},
}  # fmt: skip


@dataclass
class Trained:
    """What some steps did."""

    steps: list[StepResult]
    batches: list[tuple[str, int, float, float]]
    micro_batches: list[int]
    weights: dict[str, Tensor]


STEPS = ((0, 1, 2, 3), (3, 6), (4, 5, 6))
"""Numbers of the groups of each step: rewards of every third are equal, so those of the second all are."""


def siblings(number: int) -> list[Trajectory]:
    """Return a group behind a prompt that is long enough to be shared."""
    return [behind(each, np.arange(40, dtype=np.int32)) for each in group(number)]


def trained(backend: str, settings: str, skip: bool, parallel: ParallelConfig = UNDIVIDED) -> Trained:
    """Take some steps; of several data-parallel ranks each gets every so many-th group."""
    divide_world(parallel)
    model = tiny_model()
    trainer = BACKENDS[backend](model.config, hf_state(model), OPTIMIZER, parallel=parallel)
    given = {"updates": 1, **SETTINGS[settings]}
    batch = BatchConfig(
        tokens_per_micro_batch=120, skip_zero_advantages=skip, share_prefixes=backend == "megatron",
        updates=given.pop("updates"),
    )  # fmt: skip
    learner, ranks = LearnerConfig(**given, batch=batch), trainer.data_parallel_group
    steps, batches, micro_batches, train_step = [], [], [], trainer.train_step

    def counted(packs, *arguments, **named):
        micro_batches.append(len(packs))
        return train_step(packs, *arguments, **named)

    trainer.train_step = counted
    for step, numbers in enumerate(STEPS):
        own = [siblings(n) for n in numbers[ranks.rank() :: ranks.size()]]
        found, result = train_on(trainer, own, [0.5] * len(own), learner, step=step + 1, policy_version=7)
        steps.append(result)
        batches.append((found.xxh3(), found.trajectories, found.reward_mean, found.staleness_mean))
    return Trained(steps, batches, micro_batches, trainer.export())


def assert_equal(found: Trained, expected: Trained) -> None:
    for result, other in zip(found.steps, expected.steps, strict=True):
        assert result.left_out_tokens > other.left_out_tokens == 0
        assert result.computed_tokens < other.computed_tokens
        for name in ("tokens", "denominator", "skipped", "lr"):
            assert getattr(result, name) == getattr(other, name)
        assert result.loss == pytest.approx(other.loss, abs=2e-8)
        assert result.grad_norm == pytest.approx(other.grad_norm, rel=5e-6)
    assert found.batches == expected.batches
    for name, weight in expected.weights.items():
        assert (found.weights[name] - weight).abs().max() < 1e-6, name


CASES = [("megatron", "token TIS"), ("fsdp", "PPO in two updates")]
SLOW = [(backend, name) for backend in BACKENDS for name in SETTINGS if (backend, name) not in CASES]


@pytest.mark.parametrize(
    ("backend", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_weights_and_counts_are_those_of_an_update_on_all_trajectories(backend, settings):
    found, expected = (trained(backend, settings, skip) for skip in (True, False))
    assert_equal(found, expected)
    first, nothing, _ = found.steps
    assert (nothing.loss, nothing.grad_norm, nothing.skipped) == (0, 0, False), "moments and decay go on"
    assert nothing.left_out_tokens == nothing.tokens
    assert nothing.diagnostics == {}
    values = step_values(first)
    assert 0 < values["train/left_out_tokens"] < values["train/response_tokens"] == first.tokens


LAYOUTS = [("megatron", {}), ("fsdp", {}), ("megatron", {"context": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "layout"), LAYOUTS)
def test_ranks_of_which_some_compute_nothing_take_the_same_steps(worlds, backend, layout):
    parallel = ParallelConfig(**layout)
    one, other = worlds.run(2, trained, backend, "token TIS", True, parallel)
    assert one.micro_batches == other.micro_batches, "collectives run in each"
    assert one.steps == other.steps
    assert_equal(one, worlds.run(2, trained, backend, "token TIS", False, parallel)[0])
    assert_equal(one, trained(backend, "token TIS", False))


@pytest.mark.parametrize("name", LOSSES)
def test_the_record_of_a_loss_says_whether_tokens_without_an_advantage_have_a_gradient(name):
    """What is said is true of the loss and its gradient, far from the policy that sampled."""
    loss = LOSSES[name]()
    tokens = tokens_of(
        leaf(-1.0, -2.0, -4.0), behaviour_logprobs=-2.0, proximal_logprobs=-2.5, advantages=0.0,
        picked_by_covariance=1.0,
    )  # fmt: skip
    losses, gradient, _ = worked_out(Objective(loss), tokens)
    assert loss.facts.zero_without_advantage == (not any(losses) and not any(gradient))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": BatchConfig(skip_zero_advantages=False)},
        {"loss": RegressionLoss()},
        {"loss": KLCovLoss()},
        {"loss": PluginLoss(function="my.module:loss")},
        {"entropy_coef": 0.1},
        {"entropy_target": EntropyTargetConfig(nats=0.5)},
        {"reference": ReferenceConfig(kl_coef=0.1)},
        {"teacher": TeacherConfig(path="teacher")},
        {"mtp": MtpConfig(weight=0.2)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_objectives_that_learn_from_other_terms_leave_nothing_out(settings):
    assert LearnerConfig().skips_zero_advantages
    assert not LearnerConfig(**settings).skips_zero_advantages
