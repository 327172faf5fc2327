"""Functions of the user's own on the rewards and before the step: what they change, and what is refused."""

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError

from bus.errors import ConfigError, TrainingError
from learner.algorithms.advantages.step_advantages import advantages_of_step
from learner.algorithms.hooks import optimizer_of_step, with_processed_rewards
from learner.algorithms.plugin import refuse_bad_plugins
from learner.backends.megatron.trainer import Trainer
from learner.config.advantage import GDPOAdvantage, GRPOAdvantage, OverlongPenalty
from learner.config.learner import LearnerConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.config.plugin import HookConfig
from learner.data.batches import recorded_samples
from learner.distributed.exact_sums import exact_sums
from learner.step.rl_step import train_on
from tests.factories import make_trajectory
from tests.learner.division import divide_world
from tests.learner.tiny import VOCAB, hf_state, tiny_model

GROUPS = [
    [make_trajectory(n, sample, group_size=2, reward=reward) for sample, reward in enumerate(rewards)]
    for n, rewards in enumerate([(0.0, 4.0), (1.0, 3.0)])
]


def hook(function, **changes: object) -> HookConfig:
    return HookConfig(function=f"{__name__}:{function.__name__}", **changes)


def halved(groups, *, least=0.0):
    return [[max(least, t.reward / 2) for t in group] for group in groups]


async def shared(groups, *, sums):
    """Rewards less their mean over all ranks."""
    await asyncio.sleep(0)
    total, count = sums({"all": [(t.reward, 1.0) for group in groups for t in group]})["all"]
    return [[t.reward - total / count for t in group] for group in groups]


def one_too_few(groups):
    return [[0.0] for _ in groups]


def not_a_number(groups):
    return [[float("nan") for _ in group] for group in groups]


async def never(groups):
    await asyncio.Event().wait()


async def times_out(groups):
    times_out_at_once(groups)


def times_out_at_once(groups):
    raise TimeoutError("its server is away")


def slower_and_slower(step, groups, optimizer):
    return optimizer.model_copy(update={"lr": optimizer.lr / step}) if step > 1 else None


def by_number(step, groups, optimizer):
    return 1e-3


def offloads(step, groups, optimizer):
    return optimizer.model_copy(update={"offload": 0.5})


def advantages(**settings: object) -> list[list[float]]:
    learner = LearnerConfig(advantage=GRPOAdvantage(normalize_std=False), **settings)
    rewarded = with_processed_rewards(GROUPS, learner, exact_sums)
    found, _ = advantages_of_step(rewarded, recorded_samples(GROUPS), learner, sums=exact_sums, baselines={})
    return [list(map(float, of_group)) for of_group in found]


def test_advantages_are_of_the_rewards_that_the_function_returned():
    assert advantages() == [[-2.0, 2.0], [-1.0, 1.0]]
    assert advantages(reward_hook=hook(halved)) == [[-1.0, 1.0], [-0.5, 0.5]]
    assert advantages(reward_hook=hook(halved, settings={"least": 1.5})) == [[-0.25, 0.25], [0.0, 0.0]]


def test_penalties_come_after_the_function():
    overlong = OverlongPenalty(longest_tokens=1, margin_tokens=0)  # every answer loses 1
    processed = with_processed_rewards(GROUPS, LearnerConfig(reward_hook=hook(halved)), exact_sums)
    assert [[t.reward for t in group] for group in processed] == [[0.0, 2.0], [0.5, 1.5]]
    assert advantages(reward_hook=hook(halved), overlong=overlong) == [[-1.0, 1.0], [-0.5, 0.5]]


def test_an_async_function_is_waited_for_and_may_ask_for_sums_over_ranks():
    processed = with_processed_rewards(GROUPS, LearnerConfig(reward_hook=hook(shared)), exact_sums)
    assert [[t.reward for t in group] for group in processed] == [[-2.0, 2.0], [-1.0, 1.0]]


@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        (one_too_few, ConfigError, r"returned \[1, 1\] rewards for groups of \[2, 2\]"),
        (not_a_number, ConfigError, "the reward nan"),
        (never, TrainingError, r"took longer than 1 s"),
        (times_out, ConfigError, r"raised TimeoutError\('its server is away'\)"),
        (times_out_at_once, ConfigError, r"raised TimeoutError\('its server is away'\)"),
    ],
)
def test_what_a_reward_function_must_not_do_ends_the_learner_with_its_name(function, error, why):
    learner = LearnerConfig(reward_hook=hook(function, timeout_s=1.0))
    with pytest.raises(error, match=why):
        with_processed_rewards(GROUPS, learner, exact_sums)


def test_a_step_is_taken_with_the_settings_that_the_function_returned():
    groups = [[replace(t, token_ids=t.token_ids % VOCAB) for t in group] for group in GROUPS]

    def trained(rates: list[float], **settings: object):
        divide_world(ParallelConfig())
        model = tiny_model(seed=0)
        trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2))
        found = []
        for step, rate in enumerate(rates, 1):
            learner = LearnerConfig(optimizer=OptimizerConfig(lr=rate), **settings)
            if not settings:
                trainer.optimizer_config = learner.optimizer
            _, result = train_on(
                trainer, groups, [1.0] * len(groups), learner, step=step, policy_version=step - 1
            )
            found.append(result.lr)
        return found, trainer.export()

    rates, weights = trained([1e-2, 1e-2, 1e-2], before_step=hook(slower_and_slower))
    assert rates == [1e-2, 1e-2 / 2, 1e-2 / 3]
    _, expected = trained(rates)
    assert all((weights[name] == expected[name]).all() for name in expected)
    _, others = trained([1e-2] * 3)
    assert any((weights[name] != others[name]).any() for name in others)


@pytest.mark.parametrize(
    ("function", "why"), [(by_number, "returned float"), (offloads, r"set learner\.optimizer\.offload")]
)
def test_what_is_no_setting_for_the_optimizer_is_refused(function, why):
    with pytest.raises(ConfigError, match=why):
        optimizer_of_step(1, GROUPS, LearnerConfig(before_step=hook(function)))


def test_names_signatures_and_settings_without_effect_are_refused_at_the_start():
    refuse_bad_plugins(LearnerConfig(reward_hook=hook(shared), before_step=hook(slower_and_slower)))
    with pytest.raises(ConfigError, match=r"change the function or learner\.before_step\.settings"):
        refuse_bad_plugins(LearnerConfig(before_step=hook(halved)))
    with pytest.raises(ConfigError, match="halve' in"):
        refuse_bad_plugins(LearnerConfig(reward_hook=HookConfig(function=f"{__name__}:halve")))
    with pytest.raises(ValidationError, match="settings are for a function"):
        HookConfig(settings={"least": 1.0})
    with pytest.raises(ValidationError, match=r"learner\.reward_hook has no effect"):
        LearnerConfig(advantage=GDPOAdvantage(rewards={"a": 1.0}), reward_hook=hook(halved))
