"""What rewards lose before they become advantages, and the way from there to the advantages of a step."""

from dataclasses import replace

import numpy as np
import pytest

from bus.errors import ConfigError
from learner.algorithms.advantages.step_advantages import (
    Offered,
    advantages_of_step,
    estimate_advantages,
    overlong_penalty,
    with_overlong_penalties,
)
from learner.algorithms.advantages.whitening import whitened
from learner.algorithms.plugin import refuse_bad_plugins
from learner.config.advantage import (
    GDPOAdvantage,
    GRPOAdvantage,
    OverlongPenalty,
    PluginAdvantage,
    RAEAdvantage,
    ReinforcePPAdvantage,
)
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.data.batches import make_step_batch, recorded_samples
from learner.distributed.exact_sums import exact_sums
from tests.learner.algorithms.rewarded import group

GRPO = GRPOAdvantage(normalize_std=False)


def of_step(learner: LearnerConfig, groups, *, reference=0.0, baselines=None):
    """Advantages of a step whose reference has these log-probs at every token; NaN where none is trained."""
    samples = [
        sample.with_streams(
            reference_logprobs=np.where(sample.loss_mask, reference, np.nan).astype(np.float32)
        )
        for sample in recorded_samples(groups)
    ]
    return advantages_of_step(groups, samples, learner, sums=exact_sums, baselines=baselines or {})


def test_the_overlong_penalty_of_dapo():
    """arXiv:2503.14476, eq. 13, with its 20,480 and 4,096 tokens."""
    found = [overlong_penalty(n, longest=20480, margin=4096) for n in (1, 16384, 18432, 20479, 20480, 99999)]
    assert found == [0.0, 0.0, -0.5, -4095 / 4096, -1.0, -1.0]
    assert [overlong_penalty(n, longest=8, margin=0) for n in (7, 8, 9)] == [0.0, -1.0, -1.0]


def test_long_answers_lose_reward_before_the_baseline_and_only_there():
    short, long = group(1.0, tokens=8)[0], group(1.0, 1.0, tokens=20)[1]
    groups = [[short, long]]  # 4 and 10 sampled tokens
    learner = LearnerConfig(
        advantage=GRPO, overlong=OverlongPenalty(longest_tokens=12, margin_tokens=8, coef=2.0)
    )
    [found], _ = of_step(learner, groups)
    assert found == [0.75, -0.75]  # rewards of 1 and -0.5
    batch = make_step_batch(groups, recorded_samples(groups), [found], policy_version=0)
    assert batch.reward_mean == 1.0


def test_the_penalty_is_a_part_of_the_reward_that_gdpo_can_weigh():
    groups = [[group(1.0, tokens=8)[0], group(1.0, 1.0, tokens=20)[1]]]
    overlong = OverlongPenalty(longest_tokens=10)
    advantage = GDPOAdvantage(rewards={"overlong_penalty": 1.0}, std_floor=0.0)
    [found], _ = of_step(LearnerConfig(advantage=advantage, overlong=overlong), groups)
    assert found == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-7)
    groups[0][1] = replace(groups[0][1], reward_components={"overlong_penalty": 0.0})
    with pytest.raises(ConfigError, match="has a reward component 'overlong_penalty' already"):
        with_overlong_penalties(groups, overlong)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_the_divergence_of_all_tokens_is_taken_from_the_outcome(estimator):
    groups = [group(1.0, 0.0, 0.5)]
    reference = ReferenceConfig(kl_coef=0.1, kl_in="reward", kl_estimator=estimator)
    [found], _ = of_step(LearnerConfig(advantage=GRPO, reference=reference), groups, reference=-0.7)
    rewards = []
    for t in groups[0]:
        r = t.behaviour_logprobs[t.loss_mask].astype(float) + np.float32(0.7)
        kl = {"k1": r, "k2": r**2 / 2}.get(estimator, np.exp(-r) - 1 + r)
        rewards.append(t.reward - 0.1 * kl.sum())
    assert found == pytest.approx(np.array(rewards) - np.mean(rewards), rel=1e-6, abs=1e-7)


def test_reinforce_pp_takes_the_divergence_token_by_token():
    groups = [group(1.0, 0.0)]
    reference = ReferenceConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    learner = LearnerConfig(advantage=ReinforcePPAdvantage(), reference=reference)
    [found], _ = of_step(learner, groups, reference=-0.7)
    returns = np.concatenate([
        t.reward - 0.1 * np.cumsum((t.behaviour_logprobs[t.loss_mask] + 0.7)[::-1].astype(float))[::-1]
        for t in groups[0]
    ])  # fmt: skip
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    trained = np.concatenate([a[t.loss_mask] for a, t in zip(found, groups[0], strict=True)])
    assert trained == pytest.approx(expected, rel=1e-5)


def test_a_divergence_in_the_loss_or_the_advantage_leaves_rewards_alone():
    groups = [group(1.0, 0.0)]
    for where in ("loss", "advantage"):
        reference = ReferenceConfig(kl_coef=0.1, kl_in=where)
        assert of_step(LearnerConfig(advantage=GRPO, reference=reference), groups)[0] == [[0.5, -0.5]]


def test_a_reference_that_says_nothing_of_a_trained_token_is_noticed():
    reference = ReferenceConfig(kl_coef=0.1, kl_in="reward")
    with pytest.raises(ConfigError, match=r"g00000000\.0 has shape \[\] and non-finite values"):
        of_step(LearnerConfig(advantage=GRPO, reference=reference), [group(1.0, 0.0)], reference=np.nan)


def test_advantages_are_whitened_last_and_by_any_estimator():
    groups = [group(1.0, 0.0, 0.5), group(4.0, 9.0, lease=1, tokens=16)]
    plain, _ = of_step(LearnerConfig(advantage=GRPO), groups)
    found, _ = of_step(LearnerConfig(advantage=GRPO, whiten_advantages=True), groups)
    assert found == whitened(groups, plain, exact_sums, over="tokens")
    assert found != plain


def test_baselines_of_the_step_before_stay_as_they_are():
    before = {"default/solver": 0.5}
    found, after = of_step(LearnerConfig(advantage=RAEAdvantage(decay=0.5)), [group(1.0)], baselines=before)
    assert found == [[0.5]]
    assert (before, after) == ({"default/solver": 0.5}, {"default/solver": 0.75})
    assert of_step(LearnerConfig(advantage=GRPO), [group(1.0)], baselines=before)[1] == before


# --- a user's own function asks by the names of its parameters ---


def plain(groups, scale=1.0):
    return [[scale * t.reward for t in each] for each in groups]


def asking(groups, *, sums, baselines, token_penalties, scale):
    total = sums({"all": [(t.reward,) for each in groups for t in each]})["all"][0]
    baselines["steps"] = baselines.get("steps", 0) + 1
    return [
        [scale * t.reward / total - np.sum(lost) for t, lost in zip(*pair, strict=True)]
        for pair in zip(groups, token_penalties, strict=True)
    ]


def its_own_sums(groups, sums):
    return plain(groups, sums)


def plugin(function, **settings):
    return PluginAdvantage(function=f"{__name__}:{function.__name__}", settings=settings)


def test_a_function_of_groups_alone_is_called_as_ever():
    groups = [group(1.0, 3.0)]
    assert estimate_advantages(plugin(plain, scale=2.0), groups) == [[2.0, 6.0]]
    reference = ReferenceConfig(kl_coef=0.25, kl_in="reward", kl_estimator="k1")
    [found], _ = of_step(LearnerConfig(advantage=plugin(plain), reference=reference), groups, reference=-1.0)
    lost = [0.25 * (t.behaviour_logprobs[t.loss_mask].astype(float) + 1).sum() for t in groups[0]]
    assert found == pytest.approx([1.0 - lost[0], 3.0 - lost[1]])


def test_a_function_gets_what_it_has_parameters_for():
    groups, config = [group(1.0, 3.0)], plugin(asking, scale=4)
    refuse_bad_plugins(LearnerConfig(advantage=config))
    offered = Offered(token_penalties=[[0.5, np.full(8, 0.25)]])
    assert estimate_advantages(config, groups, offered) == [[0.5, 1.0]]
    assert offered.baselines == {"steps": 1}
    assert estimate_advantages(config, groups) == [[1.0, 3.0]]


def test_a_setting_of_that_name_stays_the_users():
    config = plugin(its_own_sums, sums=3.0)
    refuse_bad_plugins(LearnerConfig(advantage=config))
    assert estimate_advantages(config, [group(1.0)]) == [[3.0]]


def test_a_parameter_that_nobody_gives_is_named_at_the_start():
    with pytest.raises(ConfigError, match="scale"):
        refuse_bad_plugins(LearnerConfig(advantage=plugin(asking)))
