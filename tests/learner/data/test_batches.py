from dataclasses import replace

import numpy as np
import pytest

from bus.errors import ConfigError
from bus.kept_sets import KeptSets
from bus.trajectory import Turn
from learner.algorithms.advantages.step_advantages import estimate_advantages
from learner.config.advantage import GRPOAdvantage, PluginAdvantage
from learner.data.batches import DIGESTS, make_step_batch, recorded_samples
from learner.data.outcomes import Outcome, joined
from learner.data.packing import pack
from learner.metrics.step_metrics import batch_values
from tests.factories import make_trajectory


def batch_of(groups, *, policy_version=5):
    return step_batch(groups, GRPOAdvantage(std_floor=0.0), policy_version=policy_version)


def step_batch(groups, advantage, *, policy_version=5, weights=()):
    return make_step_batch(
        groups,
        recorded_samples(groups),
        estimate_advantages(advantage, groups),
        policy_version=policy_version,
        weights=weights,
    )


def with_reward(trajectory, reward, **changes):
    return replace(trajectory, reward=reward, **changes)


def test_advantages_are_relative_to_the_own_group():
    groups = [
        [with_reward(make_trajectory(0, n, group_size=2), reward) for n, reward in enumerate((0.0, 1.0))],
        [with_reward(make_trajectory(1, n, group_size=2), reward) for n, reward in enumerate((5.0, 7.0))],
    ]
    [micro_batch] = pack(batch_of(groups).samples, 16384)
    first_token = micro_batch.cu_seqlens[:-1].long()
    assert micro_batch.streams["advantages"][first_token].tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_importance_weight_of_a_group_goes_with_its_tokens_and_not_into_its_advantages():
    rewards = (0.0, 1.0)
    groups = [
        [with_reward(make_trajectory(lease, n, group_size=2), reward) for n, reward in enumerate(rewards)]
        for lease in range(2)
    ]
    batch = step_batch(groups, GRPOAdvantage(std_floor=0.0), weights=[1.0, 0.25])
    [micro_batch] = pack(batch.samples, 16384)
    first_token = micro_batch.cu_seqlens[:-1].long()
    assert micro_batch.streams["advantages"][first_token].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert micro_batch.streams["group_weights"][first_token].tolist() == [1.0, 1.0, 0.25, 0.25]
    unweighed = step_batch(groups, GRPOAdvantage(std_floor=0.0), weights=[1.0, 1.0])
    assert unweighed.digest == step_batch(groups, GRPOAdvantage(std_floor=0.0)).digest != batch.digest


def test_only_what_is_trained_is_in_the_batch_and_the_rest_is_counted():
    rewards = (0.0, 1.0, 50.0, 70.0)
    group = [with_reward(make_trajectory(0, n, group_size=4), reward) for n, reward in enumerate(rewards)]
    group[2] = with_reward(group[2], 50.0, trainable=False)
    group[3] = with_reward(group[3], 70.0, end="engine_error")
    batch = batch_of([group])
    assert [sample.name for sample in batch.samples] == ["g00000000.0", "g00000000.1"]
    assert [sample.streams["advantages"] for sample in batch.samples] == [-1.0, 1.0]
    assert (batch.trajectories, batch.untrainable, batch.untrusted, batch.reward_mean) == (2, 1, 1, 0.5)
    nothing = batch_of([group[2:]])
    assert (nothing.samples, nothing.reward_mean, nothing.staleness_mean) == ([], 0.0, 0.0)


def by_position(groups):
    """An advantage function of the user's own: a trajectory's tokens have their positions."""
    return [[np.arange(len(t.token_ids)) for t in group] for group in groups]


def one_too_few(groups):
    return [group[1:] for group in by_position(groups)]


def not_finite(groups):
    return [[np.inf for _ in group] for group in groups]


def misshapen(groups):
    return [[np.zeros(3) for _ in group] for group in groups]


def batch_by(function):
    group = [make_trajectory(0, n, group_size=2) for n in range(2)]
    advantage = PluginAdvantage(function=f"tests.learner.data.test_batches:{function}")
    return step_batch([group], advantage, weights=[0.5])


def test_a_function_of_the_users_own_gives_each_token_its_advantage():
    batch = batch_by("by_position")
    [micro_batch] = pack(batch.samples, 16384)
    of_labels = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]  # position t carries what concerns token t + 1
    assert micro_batch.streams["advantages"].tolist() == of_labels * 2
    assert batch.digest != batch_of([[make_trajectory(0, n, group_size=2) for n in range(2)]]).digest


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("one_too_few", r"returned \[1\] advantages for groups of \[2\] trajectories"),
        ("not_finite", "g00000000.0 has shape \\[\\] and non-finite values"),
        ("misshapen", r"g00000000.0 has shape \[3\]"),
        ("by_positions", "did you mean 'by_position'"),
    ],
)
def test_a_function_of_the_users_own_that_misfits_is_refused_by_name(function, reason):
    with pytest.raises(ConfigError, match=reason):
        batch_by(function)


def test_each_token_is_divided_by_the_temperature_of_its_own_turn():
    one = make_trajectory(0, 0, group_size=2, tokens=8)
    mask = np.array([False, True, True, False, True, True, False, True])
    turns = (
        Turn(1, 3, "stop", 0.5),
        Turn(4, 6, "stop", 2.0),
        Turn(6, 7, "stop", 0.0),
        Turn(7, 8, "stop", 2.0),
    )
    mixed = with_reward(one, 0.0, loss_mask=mask, turns=turns, policy_versions=np.where(mask, 5, -1))
    even = with_reward(make_trajectory(0, 1, group_size=2, tokens=8), 1.0)
    samples = batch_of([[mixed, even]]).samples
    assert samples[0].streams["temperatures"].tolist() == [1.0, 0.5, 0.5, 1.0, 2.0, 2.0, 1.0, 2.0]
    assert samples[1].streams["temperatures"] == 1.0
    [packed] = pack(samples, 100)
    assert packed.of_trained("temperatures").tolist()[:5] == [0.5, 0.5, 2.0, 2.0, 2.0]


def test_staleness_is_that_of_the_oldest_trained_token():
    fresh, old = make_trajectory(0, 0, group_size=2), make_trajectory(0, 1, group_size=2)
    versions = np.where(old.loss_mask, 5, -1).astype(np.int32)
    newer = with_reward(fresh, 0.0, policy_versions=versions)
    versions = versions.copy()
    versions[np.flatnonzero(old.loss_mask)[-1]] = 2
    batch = batch_of([[newer, with_reward(old, 1.0, policy_versions=versions)]], policy_version=5)
    assert batch.staleness_max == 3
    assert batch.staleness_mean == pytest.approx(1.5)


def test_tokens_of_a_dead_learners_later_version_are_not_stale():
    trajectory = make_trajectory(0, 0, group_size=1)
    versions = np.where(trajectory.loss_mask, 9, -1).astype(np.int32)
    batch = batch_of([[with_reward(trajectory, 1.0, policy_versions=versions)]], policy_version=5)
    assert batch.staleness_max == 0


def test_counts_cover_every_micro_batch():
    groups = [[make_trajectory(lease, n, group_size=2) for n in range(2)] for lease in range(3)]
    length = len(groups[0][0].token_ids)
    batch = batch_of(groups)
    assert len(pack(batch.samples, 2 * length)) == 3
    assert batch.trajectories == 6
    assert batch.tokens == 6 * length


def test_digest_tells_batches_apart_by_any_value():
    def digest(**changes):
        group = [with_reward(make_trajectory(0, n, group_size=2), float(n)) for n in range(2)]
        group[0] = with_reward(group[0], changes.pop("reward", 0.0), **changes)
        return batch_of([group]).xxh3()

    one = make_trajectory(0, 0, group_size=2)
    digests = {
        digest(),
        digest(token_ids=one.token_ids[::-1].copy()),
        digest(loss_mask=one.token_ids > 0),
        digest(behaviour_logprobs=one.behaviour_logprobs - np.float32(1e-7) * one.loss_mask),
        digest(policy_versions=one.policy_versions + 1),
        digest(reward=2.0),
    }
    assert len(digests) == 6
    assert digest() == digest()


def test_digest_leaves_out_what_passes_compute():
    groups = [[with_reward(make_trajectory(0, n, group_size=2), float(n)) for n in range(2)]]
    scored = [
        sample.with_streams(**{f"{policy}_logprobs": sample.streams["behaviour_logprobs"]})
        for sample, policy in zip(recorded_samples(groups), ("reference", "teacher"), strict=True)
    ]
    advantages = estimate_advantages(GRPOAdvantage(std_floor=0.0), groups)
    batch = make_step_batch(groups, scored, advantages, policy_version=5)
    assert batch.digest == batch_of(groups).digest
    assert "reference_logprobs" in batch.samples[0].streams


def test_digest_is_the_same_in_any_order_and_packing_and_counts_every_sample():
    groups = [
        [with_reward(make_trajectory(lease, n, group_size=2), float(n)) for n in range(2)]
        for lease in range(3)
    ]
    digest = batch_of(groups).xxh3()
    assert len(digest) == 32
    assert batch_of(groups[::-1]).xxh3() == digest
    assert batch_of([*groups, groups[0]]).xxh3() != digest
    parts = [batch_of(groups[:1]), batch_of(groups[1:])]
    assert sum(part.digest for part in parts) % DIGESTS == int(digest, 16)


def test_every_update_of_a_batch_trains_on_as_many_trajectories_of_each_group():
    groups = [[make_trajectory(lease, n, group_size=4) for n in range(4)] for lease in (3, 8)]
    samples = batch_of(groups).samples
    for updates in (1, 2, 4):
        parts = [[s.name for s in samples if s.update_slot % updates == n] for n in range(updates)]
        assert sorted(name for part in parts for name in part) == sorted(s.name for s in samples)
        assert {len(part) for part in parts} == {8 // updates}


def test_what_waited_for_the_learner_is_told_from_what_went_by_while_it_was_sampled():
    group = [make_trajectory(0, n, group_size=2) for n in range(2)]
    spans = [(3, 7), (8, 8)]
    for n, (oldest, newest) in enumerate(spans):
        versions = group[n].policy_versions.copy()
        sampled = np.flatnonzero(group[n].loss_mask)
        versions[sampled] = newest
        versions[sampled[0]] = oldest
        group[n] = replace(group[n], policy_versions=versions)
    values = batch_values(batch_of([group], policy_version=9))
    assert values["staleness/mean_versions"] == (6 + 1) / 2
    assert values["staleness/queued_mean_versions"] == (2 + 1) / 2
    assert values["staleness/generation_mean_versions"] == (4 + 0) / 2


def test_completed_answers_and_tokens_of_a_cut_off_distribution_are_counted():
    group = [make_trajectory(0, n, group_size=4) for n in range(4)]
    group[0] = replace(group[0], end="length")
    group[1] = replace(group[1], turns=tuple(turn._replace(top_p=0.9) for turn in group[1].turns))
    group[2] = replace(group[2], turns=tuple(turn._replace(top_k=20) for turn in group[2].turns))
    group[3] = replace(group[3], end="tool_error")  # is not trained
    turns = tuple(turn._replace(min_p=0.1) for turn in group[0].turns)
    sets = KeptSets.of([np.array([t] if m else [], np.int32) for t, m in zip(
        group[0].token_ids, group[0].loss_mask, strict=True
    )])  # fmt: skip
    group[0] = replace(
        group[0], turns=turns, kept_counts=sets.counts.tobytes(), kept_tokens=sets.token_ids.tobytes()
    )
    values = batch_values(batch_of([group]))
    assert values["rollout/completed_fraction"] == 2 / 3
    cut, trained = (sum(int(t.loss_mask.sum()) for t in some) for some in (group[1:3], group[:3]))
    assert values["rollout/cut_off_fraction"] == cut / trained
    assert batch_values(batch_of([]))["rollout/cut_off_fraction"] == 0.0


def test_rewards_their_parts_and_lengths_are_told_by_step_whatever_ranks_have_which():
    rewards = [[0.0, 1.0, 1.0], [0.25, 0.25, 0.25], [2.0]]
    groups = [
        [
            make_trajectory(lease, n, group_size=len(of), reward=reward, tokens=9 + 10 * lease + n)
            for n, reward in enumerate(of)
        ]
        for lease, of in enumerate(rewards)
    ]
    groups[0][1] = replace(groups[0][1], reward_components={"right": 1.0, "tidy": 0.5})
    groups[1][0] = replace(groups[1][0], reward_components={"right": 0.0}, end="length")
    groups[1] = [replace(t, metadata={"source": "gsm8k"}) for t in groups[1]]
    groups[2] = [replace(t, metadata={"source": "aime"}) for t in groups[2]]
    values = batch_values(batch_of(groups))
    by_source = {name: value for name, value in values.items() if name.startswith("source_")}
    assert by_source == pytest.approx({
        "source_reward/gsm8k": 0.25, "source_reward_part/gsm8k/right": 0.0, "source_reward/aime": 2.0,
        "source_response_tokens/gsm8k": np.mean([int(t.loss_mask.sum()) for t in groups[1]]),
        "source_response_tokens/aime": int(groups[2][0].loss_mask.sum()),
    })  # fmt: skip
    every = np.array([reward for of in rewards for reward in of])
    lengths = [int(t.loss_mask.sum()) for group in groups for t in group]
    assert values["reward/mean"] == pytest.approx(every.mean(), rel=1e-12)
    assert values["reward/std"] == pytest.approx(every.std(ddof=1), rel=1e-12)
    assert (values["reward/min"], values["reward/max"]) == (0.0, 2.0)
    assert values["reward/group_std_mean"] == pytest.approx(np.std(rewards[0], ddof=1) / 2, rel=1e-12)
    assert (values["reward_part/right"], values["reward_part/tidy"]) == (0.5, 0.5)
    assert values["train/response_tokens_p95"] == pytest.approx(np.percentile(lengths, 95), rel=1e-12)
    assert values["train/response_tokens_max"] == max(lengths)
    assert values["rollout/too_long_fraction"] == 1 / 7
    parts = [batch_of(groups[:1]).outcomes, batch_of(groups[1:]).outcomes, batch_of([]).outcomes]
    told = {one.trajectory_id: one.advantage for one in joined(parts).each}
    by_hand = [-(2**0.5), 2**-0.5, 2**-0.5, 0, 0, 0, 0]  # (reward - mean) / standard deviation of its group
    assert [told[t.trajectory_id] for group in groups for t in group] == pytest.approx(by_hand, abs=1e-6)
    first = groups[0][0]
    of_tokens = np.arange(len(first.token_ids), dtype=np.float64)
    assert Outcome.of(first, of_tokens).advantage == np.mean(np.flatnonzero(first.loss_mask))
    assert joined(parts).figures == pytest.approx(batch_of(groups).outcomes.figures, rel=1e-12)


def test_sampled_tokens_that_are_not_trained_are_marked():
    trajectory = make_trajectory(0, 0, group_size=1, tokens=8)
    mask = np.arange(8) >= 6
    both = replace(
        trajectory, loss_mask=mask, turns=(Turn(2, 4, "stop", temperature=1e-40), Turn(6, 8, "stop"))
    )
    alone = replace(trajectory, loss_mask=mask, turns=(Turn(6, 8, "stop"),))
    [found], [plain] = (batch_of([[one]]).samples for one in (both, alone))
    assert found.streams["temperatures"] == 1, "a quotient by that of the greedy turn would not be finite"
    assert found.streams["sampled_untrained"].tolist() == [False] * 2 + [True] * 2 + [False] * 4
    assert "sampled_untrained" not in plain.streams
    [micro_batch] = pack([plain, found], 100)
    assert micro_batch.streams["sampled_untrained"].nonzero()[:, 0].tolist() == [8 + 1, 8 + 2], (
        "where predicted"
    )
