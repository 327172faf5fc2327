"""A critic that computes common prefixes once learns what one learns that computes each of them."""

import numpy as np
import pytest
import torch

from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.config.advantage import GAEAdvantage
from learner.config.batch import BatchConfig
from learner.config.critic import CriticConfig, CriticOptimizerConfig
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.packing import Sample, pack
from learner.logprobs.logprobs import with_values
from learner.step.rl_step import train_on
from tests.learner.backends.shared_prefixes import one_prompt
from tests.learner.critics import source_of, tiny_critic
from tests.learner.division import divide_world
from tests.learner.siblings import siblings
from tests.learner.tiny import hf_state, tiny_model
from tests.learner.world.ranks_worker import group

CONFIG = CriticConfig(train="always", value_clip=0.3, optimizer=CriticOptimizerConfig(lr=5e-3, eps=1e-4))
STEPS = 2


def trainer_of(layout: dict[str, object]) -> Trainer:
    policy = tiny_model()
    return Trainer(
        policy.config, hf_state(policy), OptimizerConfig(lr=1e-2, eps=1e-4), dtype=torch.float32,
        parallel=ParallelConfig(**layout), critic=source_of(tiny_critic(), CONFIG),
    )  # fmt: skip


def to_learn(step: int) -> list[Sample]:
    """Siblings with values before the step and targets, which differ where they share tokens."""
    draw = np.random.default_rng([7, step])
    return [
        sample.with_streams(
            values=draw.normal(0, 0.5, len(sample.token_ids)).astype(np.float32),
            value_targets=draw.normal(1, 1, len(sample.token_ids)).astype(np.float32),
        )
        for sample in siblings(seed=step)
    ]


def learned(layout: dict[str, object], *, share: bool) -> tuple[list[list[float]], list[np.ndarray]]:
    """Return loss and gradient norm of each update, and the values then; on a rank of the world."""
    divide_world(ParallelConfig(**layout))
    trainer = trainer_of(layout)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    updates = [
        trainer.critic.train_step(
            pack([s for s in to_learn(step) if s.group % ranks == rank], 300, share_prefixes=share), CONFIG
        )
        for step in range(STEPS)
    ]
    learner = LearnerConfig(batch=BatchConfig(share_prefixes=share, tokens_per_micro_batch=250))
    values = [np.asarray(s.streams["values"]) for s in with_values(trainer, siblings(seed=9), learner)]
    return [[u.loss, u.grad_norm, u.values, u.clipped] for u in updates], values


def assert_alike(found, expected) -> None:
    for update, other in zip(found[0], expected[0], strict=True):
        assert update == pytest.approx(other, rel=1e-5)
    for values, others in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(values, others, atol=2e-5)


def test_updates_and_values_are_those_of_prompts_computed_for_each_trajectory():
    assert_alike(learned({}, share=True), learned({}, share=False))


@pytest.mark.first(1, others=pytest.mark.nightly)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"context": 2}], ids=str
)
def test_every_layout_of_ranks_learns_what_one_rank_without_sharing_does(worlds, layout):
    answers = worlds.run(2, learned_shared, layout)
    expected = learned({}, share=False)
    for found in answers:
        assert_alike(found, expected)


def learned_shared(layout: dict[str, object]):
    return learned(layout, share=True)


def test_a_step_uses_the_setting_in_the_passes_and_updates_of_its_critic(monkeypatch):
    groups = [one_prompt(group(1)), one_prompt(group(2))]
    results, computed = [], []
    for share in (False, True):
        batch = BatchConfig(share_prefixes=share, tokens_per_micro_batch=200)
        learner = LearnerConfig(batch=batch, advantage=GAEAdvantage(), critic=CONFIG)
        trainer, seen = trainer_of({}), []
        for name in ("values", "train_step"):
            monkeypatch.setattr(trainer.critic, name, counting(getattr(trainer.critic, name), seen))
        results.append(train_on(trainer, groups, [1.0, 1.0], learner, step=1, policy_version=4)[1])
        computed.append(sum(seen))
    apart, shared = results
    assert shared.critic == pytest.approx(apart.critic, rel=1e-5, abs=1e-6)
    assert shared.loss == pytest.approx(apart.loss, rel=1e-5, abs=1e-6)
    assert computed[0] - computed[1] == 2 * 2 * 40  # prompts of 40 tokens, in the pass and in the update


def counting(method, seen: list[int]):
    """A method that notes how many tokens its micro-batches compute."""

    def counted(micro_batches, *rest):
        seen.extend(batch.computed_tokens for batch in micro_batches)
        return method(micro_batches, *rest)

    return counted
