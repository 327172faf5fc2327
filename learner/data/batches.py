"""Turns the groups of a step into the samples that it trains on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from bus.agent_rewards import are_equal, episode_rewards
from bus.trajectory import SOURCE, Groups, Trajectory
from learner.data.outcomes import Outcome, Outcomes, spreads_of
from learner.data.packing import Sample

DIGESTS = 1 << 128
"""Number of different digests of 128 bits."""
NO_BASELINES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class StepBatch:
    """Samples of one rank in a step, and counts over them: sums, which ranks can add up."""

    samples: list[Sample]
    trajectories: int
    """Number of trajectories that are trained."""
    tokens: int
    """Tokens of prompts and responses."""
    untrainable: int
    """Trajectories of policies that are not trained, as of frozen opponents and judges."""
    untrusted: int
    """Trajectories that would be trained, but for an end that says nothing about the policy."""
    staleness_max: int
    """Versions that the oldest trained token lags behind the learner. A token of a later version, from a
    learner that died, counts as 0."""
    staleness_sum: int
    """Sum of the trajectories' staleness, in versions."""
    queued_sum: int
    """Sum of the trajectories' versions since their newest trained token: what they waited for the learner.
    The rest of their staleness went by while they were sampled."""
    completed: int
    """Trajectories whose end is "completed": neither cut off by their length nor by a limit of turns."""
    cut_off_tokens: int
    """Trained tokens that were drawn with `top_p`, `top_k` or `min_p` and have no kept set: not from the
    recorded distribution."""
    digest: int
    """Sum of the samples' digests modulo `DIGESTS`, which packing and division over ranks do not change."""
    groups: int = 0
    """Groups with a trajectory that is trained."""
    equal_groups: int = 0
    """Trained groups in which no agent's rewards differ, but for rounding."""
    outcomes: Outcomes = field(default_factory=Outcomes)
    """Rewards and lengths of the trained trajectories."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """What the advantage estimator keeps for the next step."""

    @property
    def response_tokens(self) -> int:
        """Return the number of trained tokens."""
        return sum(self.outcomes.lengths)

    @property
    def zero_rewards(self) -> int:
        return sum(reward == 0 for reward in self.outcomes.rewards)

    @property
    def reward_mean(self) -> float:
        return self.outcomes.reward_mean

    @property
    def staleness_mean(self) -> float:
        """Return the mean over the batch's trajectories, in versions."""
        return self.staleness_sum / max(1, self.trajectories)

    @property
    def queued_mean(self) -> float:
        """Return the mean over the batch's trajectories, in versions."""
        return self.queued_sum / max(1, self.trajectories)

    @property
    def response_tokens_mean(self) -> float:
        return self.response_tokens / max(1, self.trajectories)

    def xxh3(self) -> str:
        """Return `digest` in hexadecimal: equal for batches of equal samples, bit for bit in any order."""
        return f"{self.digest:032x}"


def recorded_samples(groups: Groups, *, with_experts: bool = False) -> list[Sample]:
    """Make samples of the trained trajectories, in their order, which have no advantages yet; `with_experts`,
    their tokens go to the experts that the engines sent them to."""
    trained = (trajectory for group in groups for trajectory in group if trajectory.is_trained)
    return [_sample(trajectory, trajectory.experts if with_experts else None) for trajectory in trained]


def make_step_batch(
    groups: Groups, samples: Sequence[Sample],
    advantages: Sequence[Sequence[float | NDArray[np.floating]]], *,
    policy_version: int, weights: Sequence[float] = (), baselines: Mapping[str, float] = NO_BASELINES,
) -> StepBatch:  # fmt: skip
    """Give samples their advantages and the weight of their group (1 by default), and count. `samples` are of
    the trained trajectories of `groups`, in that order; `advantages` has a number or [L] for every
    trajectory."""
    trained = [
        (trajectory, np.asarray(found, np.float64), weight)
        for group, of_group, weight in zip(groups, advantages, weights or [1.0] * len(groups), strict=True)
        for trajectory, found in zip(group, of_group, strict=True)
        if trajectory.is_trained
    ]
    samples = [
        _with_advantages(sample, found, weight)
        for sample, (_, found, weight) in zip(samples, trained, strict=True)
    ]
    everything = [trajectory for group in groups for trajectory in group]
    trajectories = [trajectory for trajectory, *_ in trained]
    agents = _rewards_of_agents(groups)
    untrainable = sum(not trajectory.trainable for trajectory in everything)
    staleness = [max(0, policy_version - trajectory.oldest_version) for trajectory in trajectories]
    return StepBatch(
        samples=samples,
        trajectories=len(trajectories),
        untrainable=untrainable,
        untrusted=len(everything) - len(trajectories) - untrainable,
        tokens=sum(len(t.token_ids) for t in trajectories),
        staleness_max=max(staleness, default=0),
        staleness_sum=sum(staleness),
        queued_sum=sum(max(0, policy_version - trajectory.newest_version) for trajectory in trajectories),
        completed=sum(trajectory.end == "completed" for trajectory in trajectories),
        cut_off_tokens=sum(_cut_off_tokens(trajectory) for trajectory in trajectories),
        digest=sum(sample.xxh3() for sample in samples) % DIGESTS,
        groups=len(agents),
        equal_groups=sum(all(map(are_equal, episodes)) for episodes in agents),
        outcomes=Outcomes(
            [Outcome.of(trajectory, found) for trajectory, found, _ in trained],
            spreads_of(rewards for episodes in agents for rewards in episodes),
        ),
        baselines=baselines,
    )


def _with_advantages(sample: Sample, advantages: NDArray[np.float64], weight: float) -> Sample:
    """Return the sample with its advantages and with the weight of its group, if that is not 1. A weight of 1
    is no stream, so that the digest of such a batch is that of one without weights."""
    found = advantages.astype(np.float32) if advantages.ndim else float(advantages)
    return sample.with_streams(advantages=found, **({} if weight == 1.0 else {"group_weights": weight}))


def _rewards_of_agents(groups: Groups) -> list[list[list[float]]]:
    trained = [[one for one in group if one.is_trained] for group in groups]
    return [
        [[*episodes.values()] for episodes in episode_rewards(one.agent_reward for one in group).values()]
        for group in trained
        if group
    ]


def _sample(trajectory: Trajectory, experts: NDArray[np.unsignedinteger] | None) -> Sample:
    return Sample(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        streams={
            "behaviour_logprobs": trajectory.behaviour_logprobs,
            "policy_versions": trajectory.policy_versions,
            "temperatures": _temperatures(trajectory),
            **_over_older_kv(trajectory),
            **_sampled_untrained(trajectory),
        },
        update_slot=trajectory.lease_id + trajectory.sample,
        group=trajectory.lease_id,
        episode=trajectory.episode_id,
        kept=trajectory.kept_sets,
        experts=experts,
        images=trajectory.images,
        source=str(trajectory.metadata.get(SOURCE, "")),
        name=trajectory.trajectory_id,
    )


def _cut_off_tokens(trajectory: Trajectory) -> int:
    kept, mask = trajectory.kept_sets, trajectory.loss_mask
    unrecorded = mask if kept is None else mask & (kept.counts == 0)
    return sum(
        int(np.count_nonzero(unrecorded[turn.start : turn.stop]))
        for turn in trajectory.turns
        if turn.is_cut_off
    )


def _over_older_kv(trajectory: Trajectory) -> dict[str, NDArray[np.bool_]]:
    """Return the stream of tokens that were sampled over keys and values of older weights; none without
    any."""
    kv_versions = trajectory.kv_versions
    return {} if kv_versions is None else {"over_older_kv": kv_versions != trajectory.policy_versions}


def _sampled_untrained(trajectory: Trajectory) -> dict[str, NDArray[np.bool_]]:
    """Return the stream of sampled tokens that are not trained, such as greedy turns; none without any."""
    others = np.zeros(len(trajectory.token_ids), np.bool_)
    for turn in trajectory.turns:
        others[turn.start : turn.stop] = True
    others &= ~trajectory.loss_mask
    return {"sampled_untrained": others} if others.any() else {}


def _temperatures(trajectory: Trajectory) -> NDArray[np.float32] | float:
    """Return what divided the logits of each token when it was sampled, [L], or the one of all turns. Greedy
    turns are never trained, so theirs is left at 1."""
    drawn = [turn for turn in trajectory.turns if not turn.is_greedy]
    if len({turn.temperature for turn in drawn}) == 1:
        return drawn[0].temperature
    temperatures = np.ones(len(trajectory.token_ids), np.float32)
    for turn in drawn:
        temperatures[turn.start : turn.stop] = turn.temperature
    return temperatures
