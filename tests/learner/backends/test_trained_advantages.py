"""Every advantage trains end to end as transformers with torch's AdamW does on advantages by its formula."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch

from bus.trajectory import Trajectory
from learner.backends.megatron.core.megatron_core import parallel_state
from learner.backends.megatron.trainer import Trainer
from learner.config.advantage import (
    DiscountedReturns,
    GDPOAdvantage,
    GRPOAdvantage,
    HierarchicalAdvantage,
    MaxRLAdvantage,
    OAPLAdvantage,
    OverlongPenalty,
    PluginAdvantage,
    RAEAdvantage,
    ReinforcePPAdvantage,
    ReinforcePPBaselineAdvantage,
    RLOOAdvantage,
    TurnCredit,
)
from learner.config.algorithm import ConstantDenominator
from learner.config.batch import BatchConfig
from learner.config.frozen_policies import ReferenceConfig
from learner.config.learner import LearnerConfig
from learner.config.loss import RegressionLoss
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import ParallelConfig
from learner.data.batches import recorded_samples
from learner.step.rl_step import train_on
from tests.learner.backends.trained_groups import GROUPS, STEPS, groups_of, logprobs
from tests.learner.choices import ADVANTAGES as BUILT_IN
from tests.learner.division import divide_world
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import hf_state, reference_logits, tiny_model

pytestmark = pytest.mark.slow

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-4)
POLICY, REFERENCE = 0, 1
"""Seeds of their weights."""
KL = ReferenceConfig(kl_coef=0.3, kl_in="reward", kl_estimator="k1")
ADVANTAGES = {
    "grpo": {"advantage": GRPOAdvantage()},
    "dr_grpo": {
        "advantage": GRPOAdvantage(normalize_std=False), "aggregation": ConstantDenominator(tokens=10)
    },
    "rloo, kl in the reward": {"advantage": RLOOAdvantage(), "reference": KL},
    "maxrl": {"advantage": MaxRLAdvantage()},
    "gdpo": {"advantage": GDPOAdvantage(rewards={"correct": 1.0, "format": 0.5})},
    "reinforce_pp, kl in the reward": {"advantage": ReinforcePPAdvantage(), "reference": KL},
    "reinforce_pp, discounted": {"advantage": ReinforcePPAdvantage(discount_per_token=0.8)},
    "reinforce_pp_baseline": {"advantage": ReinforcePPBaselineAdvantage(), "reference": KL},
    "discounted_returns": {"advantage": DiscountedReturns(discount_per_turn=0.5)},
    "turn_credit": {"advantage": TurnCredit(outcome_coef=0.5)},
    "hierarchical": {"advantage": HierarchicalAdvantage(within_episode=("solver",))},
    "rae": {"advantage": RAEAdvantage(decay=0.8)},
    "overlong": {
        "advantage": RLOOAdvantage(), "overlong": OverlongPenalty(longest_tokens=12, margin_tokens=8)
    },
    "whitened": {"advantage": RLOOAdvantage(), "whiten_advantages": True},
    "plugin": {"advantage": PluginAdvantage(function=f"{__name__}:by_sums")},
    "oapl": {
        "advantage": OAPLAdvantage(value_kl_weight=0.5),
        "loss": RegressionLoss(kl_weight=0.2),
        "aggregation": ConstantDenominator(tokens=1),
    },
}  # fmt: skip


def by_sums(groups, *, sums, baselines):
    """Rewards over the sum of all so far, on all ranks and in all steps."""
    [total] = sums({"all": [(t.reward,) for each in groups for t in each]})["all"]
    baselines["sum"] = baselines.get("sum", 0.0) + total
    return [[t.reward / baselines["sum"] for t in each] for each in groups]


# --- the formulas, trajectory by trajectory ---


def relative(value, trajectory, group, divide=True):
    """The value of a trajectory less the mean of the group's, over their deviation."""
    values = [value(other) for other in group]
    return (value(trajectory) - fmean(values)) / (pstdev(values) + 1e-4 if divide else 1.0)


def reward(trajectory: Trajectory) -> float:
    return trajectory.reward


def left_out(t, group):
    return t.reward - fmean(other.reward for other in group if other is not t)


def by_turn(t: Trajectory, values: list[float]) -> np.ndarray:
    found = np.zeros(len(t.token_ids))
    for turn, value in zip(t.turns, values, strict=True):
        found[turn.start : turn.stop] = value
    return found


def returns_of_turns(t: Trajectory) -> list[float]:
    last = (t.turns[1].reward or 0.0) + t.reward
    return [t.turns[0].reward + 0.5 * last, last]


def turn_credit(t, group):
    own = [relative(lambda o: o.turns[0].reward, t, group), 0.0]
    if t.turns[1].reward is not None:
        own[1] = relative(lambda o: o.turns[1].reward, t, [o for o in group if o.turns[1].reward is not None])
    outcome = relative(reward, t, group)
    factors = [1.0 if turn.reward is None else 0.5 for turn in t.turns]
    return by_turn(t, [a + factor * outcome for a, factor in zip(own, factors, strict=True)])


def discounted(t, tokens: np.ndarray, factor: float) -> np.ndarray:
    """Discounted sums of what the tokens get and the outcome, which is the last token's."""
    places = np.flatnonzero(t.loss_mask)
    gained = tokens + t.reward * (np.arange(len(tokens)) == places[-1])
    found = np.zeros(len(tokens))
    for n, place in enumerate(places):
        found[place] = sum(factor**m * gained[other] for m, other in enumerate(places[n:]))
    return found


def shortened(t: Trajectory) -> Trajectory:
    """The trajectory with the penalty for more than 4 of at most 12 tokens."""
    return replace(t, reward=t.reward - min(1.0, max(0.0, (int(t.loss_mask.sum()) - 4) / 8)))


FORMULAS = {
    "grpo": lambda t, group, kl: relative(reward, t, group),
    "dr_grpo": lambda t, group, kl: relative(reward, t, group, divide=False),
    "rloo, kl in the reward": lambda t, group, kl: left_out(
        replace(t, reward=t.reward - kl(t).sum()),
        [replace(o, reward=o.reward - kl(o).sum()) for o in group if o is not t],
    ),
    "maxrl": lambda t, group, kl: t.reward / fmean(o.reward for o in group) - 1,
    "gdpo": lambda t, group, kl: (
        relative(lambda o: o.reward_components["correct"], t, group)
        + 0.5 * relative(lambda o: o.reward_components["format"], t, group)
    ),
    "reinforce_pp, kl in the reward": lambda t, group, kl: discounted(t, -kl(t), 1.0),
    "reinforce_pp, discounted": lambda t, group, kl: discounted(t, np.zeros(len(t.token_ids)), 0.8),
    "reinforce_pp_baseline": lambda t, group, kl: relative(reward, t, group, divide=False) - kl(t),
    "discounted_returns": lambda t, group, kl: by_turn(
        t, [relative(lambda o, n=n: returns_of_turns(o)[n], t, group) for n in (0, 1)]
    ),
    "turn_credit": lambda t, group, kl: turn_credit(t, group),
    "hierarchical": lambda t, group, kl: relative(reward, t, [o for o in group if o.rollout == t.rollout]),
    "overlong": lambda t, group, kl: left_out(shortened(t), [shortened(o) for o in group if o is not t]),
    "whitened": lambda t, group, kl: left_out(t, group),
    "oapl": lambda t, group, kl: t.reward - 0.5 * np.log(fmean(np.exp(o.reward / 0.5) for o in group)),
}
OF_ALL_RANKS = (
    "gdpo", "reinforce_pp, kl in the reward", "reinforce_pp, discounted", "rae", "whitened", "plugin"
)  # fmt: skip
OVER_TOKENS = {name for name in FORMULAS if "reinforce_pp" in name} | {"whitened"}


def normalised(found: list[np.ndarray], weights: list[np.ndarray]) -> list[np.ndarray]:
    """Each less the mean of those that have a weight, over the deviation of a sample."""
    taken = np.concatenate([a[w] for a, w in zip(found, weights, strict=True)])
    return [(a - taken.mean()) / taken.std(ddof=1) for a in found]


def expected_advantages(name: str, groups, reference_logprobs, kept: dict[str, float]) -> list[np.ndarray]:
    """[L] of each trajectory of the step; `kept` is what the step before left, and changes."""
    flat = [t for group in groups for t in group]
    if name in ("rae", "plugin"):
        found = stateful(name, flat, kept)
    else:
        lost = {
            t.trajectory_id: 0.3 * np.where(t.loss_mask, t.behaviour_logprobs.astype(float) - r, 0.0)
            for t, r in zip(flat, reference_logprobs, strict=True)
        }
        found = [FORMULAS[name](t, group, lambda o: lost[o.trajectory_id]) for group in groups for t in group]
    found = [np.broadcast_to(a, len(t.token_ids)) for a, t in zip(found, flat, strict=True)]
    if name in OVER_TOKENS:
        return normalised(found, [t.loss_mask for t in flat])
    if name == "gdpo":
        return normalised(found, [np.arange(len(t.token_ids)) == 0 for t in flat])
    return found


def stateful(name: str, flat: list[Trajectory], kept: dict[str, float]) -> list[float]:
    before, total = kept.get("kept", 0.0), sum(t.reward for t in flat)
    if name == "plugin":
        kept["kept"] = before + total
        return [t.reward / kept["kept"] for t in flat]
    kept["kept"] = 0.8 ** len(flat) * before + (1 - 0.8 ** len(flat)) * total / len(flat)
    return [t.reward - before for t in flat]


# --- the training ---


@cache
def expected(name: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]:
    """Loss and gradient norm of every step, the weights then, and what the estimator keeps."""
    policy, other, kept, steps = tiny_model(seed=POLICY), tiny_model(seed=REFERENCE), {}, []
    optimizer = reference_optimizer(policy, OPTIMIZER)
    for step in range(STEPS):
        groups = groups_of(name, step)
        samples = recorded_samples(groups)
        advantages = expected_advantages(name, groups, logprobs(other, samples), kept)
        samples = [s.with_streams(advantages=a) for s, a in zip(samples, advantages, strict=True)]
        if name == "oapl":
            steps.append(squared_errors(policy, optimizer, samples, 0.2))
            continue
        factor = sum(s.trained_tokens for s in samples) / (10 * len(samples)) if name == "dr_grpo" else 1.0
        steps.append(reference_step(policy, optimizer, samples, loss="tis", lr=OPTIMIZER.lr, factor=factor))
    return steps, hf_state(policy), kept.get("kept", 0.0)


def squared_errors(model, optimizer, samples, b: float) -> tuple[float, float]:
    """Update on the mean over trajectories of (b log W - (r - V))^2 / (2 b), without what is constant; return
    it and the gradient's norm (arXiv:2602.19362, eq. 3)."""
    logits, start, losses = reference_logits(model, samples).log_softmax(-1), 0, []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids[1:]).long()[:, None]
        log_ratio = logits[start : start + len(ids)].gather(-1, ids)[:, 0] - torch.from_numpy(
            sample.streams["behaviour_logprobs"][1:]
        )
        advantage = float(sample.streams["advantages"][0])
        whole = log_ratio[torch.from_numpy(sample.loss_mask[1:])].sum()
        losses.append(((b * whole - advantage) ** 2 - advantage**2) / (2 * b))
        start += len(sample.token_ids)
    mean = torch.stack(losses).mean()
    optimizer.zero_grad()
    mean.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return mean.item(), norm.item()


def train(name: str, layout: dict[str, int]):
    """Loss and gradient norm of every step, the weights then, what is kept, and the batches' digests."""
    divide_world(ParallelConfig(**layout))
    model = tiny_model(seed=POLICY)
    trainer = Trainer(model.config, hf_state(model), OPTIMIZER, parallel=ParallelConfig(**layout))
    trainer.frozen.load("reference", model.config, hf_state(tiny_model(seed=REFERENCE)), Path("elsewhere"))
    learner = LearnerConfig(batch=BatchConfig(tokens_per_micro_batch=40), **ADVANTAGES[name])
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    steps, digests, kept = [], [], {}
    for step in range(STEPS):
        own = groups_of(name, step)[: GROUPS - 1] if ranks > 1 and rank == 0 else groups_of(name, step)
        own = own[GROUPS - 1 :] if ranks > 1 and rank > 0 else own
        batch, result = train_on(
            trainer, own, [1.0] * len(own), learner, step=step + 1, policy_version=step, baselines=kept
        )
        kept = batch.baselines
        steps.append((result.loss, result.grad_norm))
        digests.append(batch.xxh3())
    return steps, trainer.export(), dict(kept), digests


def assert_as_expected(name: str, steps, weights, kept) -> None:
    expected_steps, expected_weights, expected_kept = expected(name)
    for found, wanted in zip(steps, expected_steps, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5, rel=5e-5)
    for key, weight in expected_weights.items():
        assert (weights[key] - weight).abs().max() < 2e-5
    assert list(kept.values()) == pytest.approx([expected_kept] if name in ("rae", "plugin") else [])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_steps_follow_plain_torch_adamw_on_advantages_by_their_formula(name):
    steps, weights, kept, _ = train(name, {})
    assert all(norm > 1e-3 for _, norm in steps)
    assert_as_expected(name, steps, weights, kept)


def test_every_advantage_is_trained_here_but_for_that_of_a_critic():
    trained = {settings["advantage"].type for settings in ADVANTAGES.values()}
    assert trained == {*BUILT_IN, "plugin"} - {"gae"}  # which tests/learner/backends/test_critic.py trains


@pytest.mark.first(2, others=pytest.mark.nightly)
@pytest.mark.parametrize("name", OF_ALL_RANKS)
def test_two_ranks_train_as_one_does_on_the_same_bits(worlds, name):
    _, _, kept, digests = train(name, {})
    answers = worlds.run(2, train, name, {})
    assert_as_expected(name, answers[0][0], answers[0][1], kept)
    for steps, _, kept_there, digests_there in answers:
        assert steps == answers[0][0]
        assert kept_there == kept
        if name != "reinforce_pp, kl in the reward":  # a pass of other packs ends in other last bits
            assert digests_there == digests


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_ranks_that_share_a_sequence_have_the_same_advantages(worlds, layout):
    name = "reinforce_pp, kl in the reward"
    answers = worlds.run(2, train, name, layout)
    assert_as_expected(name, *answers[0][:3])
