"""Which tokens are actions, what they are rewarded for, and what a critic learns about them."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from bus.errors import ConfigError
from bus.trajectory import Trajectory, Turn
from learner.algorithms.advantages.gae import CriticValues, TrajectoryValues, value_targets
from learner.algorithms.advantages.step_advantages import (
    Offered,
    advantages_of_step,
    estimate_advantages,
    with_value_targets,
)
from learner.algorithms.losses.objective import Objective
from learner.config.advantage import GAEAdvantage, OverlongPenalty, PluginAdvantage
from learner.config.critic import CriticConfig
from learner.config.learner import LearnerConfig
from learner.data.batches import recorded_samples
from learner.distributed.exact_sums import exact_sums
from tests.factories import make_trajectory

VALUES = np.arange(12.0) / 8
"""Of a trajectory whose actions are the tokens 2, 3, 6, 7 and 10."""
MASK = np.isin(np.arange(12), [2, 3, 6, 7, 10])


def two_turns_and_one_alone(**changes: object) -> Trajectory:
    """Tools write the tokens 4, 5, 8 and 9 in between, and 11 at the end."""
    made = make_trajectory(tokens=12, reward=4.0)
    turns = (Turn(2, 4, "stop", reward=1.0), Turn(6, 8, "stop"), Turn(9, 11, "stop", reward=2.0))
    made = replace(made, loss_mask=MASK, turns=turns)
    return replace(made, **changes)


def of(trajectory: Trajectory, critic: CriticConfig, log_ratios: np.ndarray | None = None, lam: float = 1.0):
    """Advantages and targets of one trajectory, whose reward is not shaped."""
    known = TrajectoryValues(values=VALUES, log_ratios=log_ratios)
    offered = Offered(critic=CriticValues(config=critic, of=[[known]]))
    [[advantages]] = estimate_advantages(GAEAdvantage(trace_decay=lam), [[trajectory]], offered)
    [targets] = value_targets([[trajectory]], offered.critic, None)
    return advantages, targets


def test_tokens_of_tools_are_no_actions():
    advantages, targets = of(two_turns_and_one_alone(), CriticConfig(discount=0.5), lam=0.0)
    after = VALUES[[3, 6, 7, 10]]
    rewards = [0, 1, 0, 0, 6]  # of the turn at its last token, of the outcome at the last of all
    expected = rewards + 0.5 * np.append(after, 0.0) - VALUES[[2, 3, 6, 7, 10]]
    np.testing.assert_allclose(advantages[MASK], expected, rtol=1e-15)
    assert not advantages[~MASK].any()
    returns = [0.5 + 0.0625 * 6, 1 + 0.125 * 6, 0.25 * 6, 0.5 * 6, 6]
    np.testing.assert_allclose(targets[MASK], returns, rtol=1e-15)
    assert np.isnan(targets[~MASK]).all()


def test_a_turn_is_one_action_from_the_state_before_its_first_token():
    advantages, targets = of(two_turns_and_one_alone(), CriticConfig(level="turn", discount=0.5), lam=0.0)
    first, second, third = 1 + 0.5 * VALUES[6] - VALUES[2], 0.5 * VALUES[10] - VALUES[6], 6 - VALUES[10]
    expected = [0, 0, first, first, 0, 0, second, second, 0, 0, third, 0]
    np.testing.assert_allclose(advantages, expected, rtol=1e-15)
    learned = np.isin(np.arange(12), [2, 6, 10])
    np.testing.assert_allclose(targets[learned], [1 + 0.25 * 6, 0.5 * 6, 6], rtol=1e-15)
    assert np.isnan(targets[~learned]).all()


@pytest.mark.parametrize("level", ["token", "turn"])
def test_without_values_it_is_reinforce_on_the_returns(level):
    known = TrajectoryValues(values=np.zeros(12))
    critic = CriticValues(config=CriticConfig(level=level), of=[[known]])
    offered = Offered(critic=critic)
    [[found]] = estimate_advantages(GAEAdvantage(trace_decay=1.0), [[two_turns_and_one_alone()]], offered)
    assert found.tolist() == [0, 0, 7, 7, 0, 0, 6, 6, 0, 0, 6, 0]


def test_the_reward_of_a_turn_that_is_not_trained_belongs_to_the_action_before_it():
    mask = np.isin(np.arange(12), [6, 7])  # the first and the last turn were greedy
    turns = (Turn(2, 4, "stop", 0.0, reward=1.0), Turn(6, 8, "stop"), Turn(9, 11, "stop", 0.0, reward=2.0))
    advantages, _ = of(two_turns_and_one_alone(loss_mask=mask, turns=turns), CriticConfig(level="turn"))
    assert advantages[6] == 6 - VALUES[6]  # 1.0 came before anything was done
    assert np.flatnonzero(advantages).tolist() == [6, 7]


def test_the_ratio_of_a_turn_is_the_product_over_its_tokens():
    log_ratios = np.where(MASK, np.log(0.5), 50.0)
    critic = CriticConfig(level="turn", targets="vtrace")
    _, targets = of(two_turns_and_one_alone(), critic, log_ratios)
    weights, values = [0.25, 0.25, 0.5], VALUES[[2, 6, 10]]
    surprises = np.array([1.0, 0.0, 6.0]) + np.append(values[1:], 0) - values
    third = weights[2] * surprises[2]
    second = weights[1] * surprises[1] + weights[1] * third
    first = weights[0] * surprises[0] + weights[0] * second
    np.testing.assert_allclose(targets[[2, 6, 10]], values + np.array([first, second, third]), rtol=1e-14)


def test_only_a_trained_first_token_leaves_nothing_to_credit():
    mask = np.arange(12) == 0
    trajectory = two_turns_and_one_alone(loss_mask=mask, turns=(Turn(0, 1, "stop"),))
    advantages, targets = of(trajectory, CriticConfig())
    assert not advantages.any()
    assert np.isnan(targets).all()


def test_shaped_rewards_and_what_is_not_trained():
    learner = LearnerConfig(
        advantage=GAEAdvantage(trace_decay=1.0), overlong=OverlongPenalty(longest_tokens=5),
        critic=CriticConfig(level="turn"),
    )  # fmt: skip
    groups = [[two_turns_and_one_alone(), two_turns_and_one_alone(trainable=False)]]
    samples = [sample.with_streams(values=VALUES) for sample in recorded_samples(groups)]
    [[found, other]], _ = advantages_of_step(groups, samples, learner, sums=exact_sums, baselines={})
    assert found[10] == 6 - 1.0 - VALUES[10]  # the penalty for its five tokens
    assert other == 0.0
    [sample] = with_value_targets(groups, samples, learner)
    assert sample.streams["value_targets"][[2, 6, 10]].tolist() == [6.0, 5.0, 5.0]


def test_penalties_of_tokens_are_taken_where_they_arise():
    penalties = np.zeros(12)
    penalties[[3, 5, 10]] = [0.25, 100.0, 0.5]  # token 5 is a tool's
    known = TrajectoryValues(values=np.zeros(12))
    offered = Offered(critic=CriticValues(config=CriticConfig(), of=[[known]]), token_penalties=[[penalties]])
    [[found]] = estimate_advantages(GAEAdvantage(trace_decay=1.0), [[two_turns_and_one_alone()]], offered)
    assert found[MASK].tolist() == [6.25, 6.25, 5.5, 5.5, 5.5]


def of_critic(groups, *, critic, factor):
    """An advantage of the user's: what the critic thinks of the first action."""
    return [[factor * known.values[2] for known in group] for group in critic.of]


def test_a_function_of_the_users_may_ask_for_the_critic():
    function = PluginAdvantage(function=f"{__name__}:of_critic", settings={"factor": 2.0})
    known = TrajectoryValues(values=VALUES)
    offered = Offered(critic=CriticValues(config=CriticConfig(train="always"), of=[[known]]))
    assert estimate_advantages(function, [[two_turns_and_one_alone()]], offered) == [[0.5]]
    with pytest.raises(ConfigError, match=r"critic\.train=always"):
        estimate_advantages(function, [[two_turns_and_one_alone()]])


def test_settings_of_a_critic_that_is_not_there_are_refused():
    with pytest.raises(ValidationError, match=r"learner\.critic\.warmup_steps=3 has no effect"):
        LearnerConfig(critic=CriticConfig(warmup_steps=3))
    with pytest.raises(ValidationError, match=r"c_bar=1\.0 is above critic\.rho_bar=0\.5"):
        CriticConfig(targets="vtrace", rho_bar=0.5)
    assert not LearnerConfig().has_critic
    assert LearnerConfig(critic=CriticConfig(train="always", warmup_steps=3)).only_critic_trains(3)
    assert not LearnerConfig(
        advantage=GAEAdvantage(), critic=CriticConfig(warmup_steps=3)
    ).only_critic_trains(4)


def test_log_probs_before_the_step_are_computed_for_vtrace_alone():
    with_gae, vtrace = CriticConfig(), CriticConfig(targets="vtrace")
    assert Objective.of(LearnerConfig(advantage=GAEAdvantage(), critic=with_gae)).policies == ()
    assert Objective.of(LearnerConfig(advantage=GAEAdvantage(), critic=vtrace)).policies == ("proximal",)
