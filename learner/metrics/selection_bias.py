"""Compares what the learner trains on with all that actors sampled: which answers get lost on the way."""

from collections import deque

from bus.actor_counters import SampledCounts
from bus.messages import Metrics

STEPS = 32
"""Latest steps over which both sides are compared: an actor's counters come every second, and the data of a
step was sampled some steps ago."""
NOTHING = SampledCounts()


class SelectionBias:
    """Sums up both sides over the latest steps.

    Group filters, failed or late rollouts and sampling strategies take trajectories away. Where long or hard
    ones are lost more often than others, the policy is trained on another distribution than it samples.
    """

    def __init__(self) -> None:
        self._told: dict[str, SampledCounts] = {}
        """The latest counters of each actor, which begin at its start."""
        self._sampled = NOTHING
        """Sampled since the last step."""
        self._steps: deque[tuple[SampledCounts, SampledCounts]] = deque(maxlen=STEPS)
        """What each step consumed, and what was sampled before it and after the step before."""

    def hear(self, metrics: Metrics) -> None:
        """Take note of an actor's counters. The first ones of an actor say only from where it counts on."""
        counts = SampledCounts.of(metrics.values)
        if counts is None:
            return
        if (before := self._told.get(metrics.source)) is not None:
            self._sampled = self._sampled.plus(counts.since(before))
        self._told[metrics.source] = counts

    def figures(self, *, trajectories: int, tokens: float, reward_sum: float) -> dict[str, float]:
        """Take note of a step that trained on so much; return figures over the latest steps.

        `selection/length_ratio` is the mean number of sampled tokens in a trajectory that was trained on over
        that of all which were sampled, `selection/reward_shift` the difference of the mean rewards. A figure
        is left out while a side has no trajectory.
        """
        consumed = SampledCounts(trajectories, round(tokens), trajectories, reward_sum)
        self._steps.append((consumed, self._sampled))
        self._sampled = NOTHING
        trained, sampled = NOTHING, NOTHING
        for of_step, before_it in self._steps:
            trained, sampled = trained.plus(of_step), sampled.plus(before_it)
        found = {}
        if trained.tokens and sampled.tokens:
            length = sampled.tokens / sampled.trajectories
            found["selection/length_ratio"] = trained.tokens / trained.trajectories / length
        if trained.rewarded and sampled.rewarded:
            mean = sampled.reward_sum / sampled.rewarded
            found["selection/reward_shift"] = trained.reward_sum / trained.rewarded - mean
        return found
