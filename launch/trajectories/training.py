"""What the learner made of trajectories: the steps that trained on them, advantages and importance ratios."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bus.errors import ConfigError, StorageError
from bus.trajectory import TRUSTED_ENDS, Trajectory
from launch.run_view.recorded_runs import recorded_runs
from learner.data.outcomes import ImportanceRatios
from learner.metrics import trained_facts, trained_logprobs
from learner.metrics.trained_facts import TrainedFacts
from learner.metrics.trained_logprobs import TrainedLogprobs
from storage.disk.run_directory import RunDirectory
from storage.ledger.ledger_reader import GroupUse, facts_of, use_of_leases
from storage.prompts.data_sets import PastPrompts

LARGEST_LOG_RATIO = 20.0
"""Nats at which log ratios are cut off: JSON has no infinity."""
OVER = frozenset({"finished", "stopped", "failed", "lost"})
"""States of a run in which no step goes on."""


class Evaluation(NamedTuple):
    """What an evaluation measured."""

    policy_version: int
    data_set: str


@dataclass(frozen=True)
class GroupTraining:
    """What the files of a run say of one group; nothing is known where they are on another host."""

    use: GroupUse | None = None
    """What the ledger says of the group."""
    ended: str = ""
    """State of a run that is over; empty while it may go on."""
    facts: Mapping[int, Mapping[int, TrainedFacts]] = field(default_factory=dict)
    """What steps made of its trajectories, by step and sample, as far as the learner recorded it here."""
    logprobs: Mapping[str, TrainedLogprobs] = field(default_factory=dict)
    """Log-probs of its trajectories under the learner's weights, by name, where they are recorded."""
    label: str | None = None
    evaluation: Evaluation | None = None
    """Evaluation that its trajectories are answers of, which are held out of training; None for others."""

    @property
    def weights(self) -> dict[int, float]:
        """Return the weight of the group in each step that trained on it. The latest step that was given the
        group has trained on it once a checkpoint has that step, or its facts are recorded."""
        if self.use is None:
            return {}
        steps = dict(self.use.weights)
        latest = max(steps, default=0)
        if self.use.state != "committed" and latest not in self.facts:
            steps.pop(latest, None)
        return steps

    def advantage(self, t: Trajectory) -> float | None:
        """Return the mean advantage of a trajectory in the latest step that trained on it, if it is known."""
        facts = self._facts(t)
        return None if facts is None else facts.advantage

    def importance_ratios(self, t: Trajectory) -> ImportanceRatios | None:
        facts = self._facts(t)
        return None if facts is None else facts.ratios

    def _facts(self, t: Trajectory) -> TrainedFacts | None:
        of_steps = (self.facts.get(step, {}).get(t.sample) for step in reversed(self.weights))
        return next((facts for facts in of_steps if facts is not None), None)

    def ratios(self, t: Trajectory) -> list[float | None] | None:
        """Return the importance ratio of each token, None for one not trained; None if none was recorded."""
        known = self.logprobs.get(t.trajectory_id)
        return None if known is None else importance_ratios(t, known)

    def told(self, t: Trajectory) -> str:
        """Return in which steps a trajectory was trained, with which weights, or why it was not."""
        if self.evaluation is not None:
            version, data_set = self.evaluation
            how = "greedy" if is_greedy(t) else "sampled"
            return f"held out of training, evaluated at version {version} on {data_set}, {how}"
        if not t.trainable:
            return f"not trained, because {t.agent} is not the policy that is trained"
        if t.end not in TRUSTED_ENDS:
            return f"not trained, because its end, {t.end.replace('_', ' ')}, says nothing about the policy"
        if self.use is None:
            return "not known here: the run's ledger is on another host"
        if self.weights:
            steps = (f"step {step} with weight {weight:g}" for step, weight in self.weights.items())
            return f"trained in {' and in '.join(steps)}"
        if self.use.state == "rejected":
            return (
                f"not trained, because its group was rejected: {self.use.reason or 'no reason is recorded'}"
            )
        if self.ended:
            return f"not trained, because the run is {self.ended} and no step trained on its group"
        if self.use.weights:
            return f"given to step {max(self.use.weights)}, which has not ended"
        return "not trained yet: its group waits for a step"


def is_greedy(t: Trajectory) -> bool:
    """Return whether all tokens were chosen, not drawn."""
    return bool(t.turns) and all(turn.is_greedy for turn in t.turns)


def ended_state(run: RunDirectory) -> str:
    """Return the state of a run that is over; empty for one that may go on."""
    [found] = recorded_runs([run.path])
    return found.state if found.state in OVER else ""


def training_of(run: RunDirectory, leases: Iterable[int], ended: str) -> dict[int, GroupTraining]:
    """Return what the files in the directory of a run say of these groups; `ended` is its `ended_state`."""
    leases = [*leases]
    uses: dict[int, GroupUse] = {}
    prompts = None
    with suppress(ConfigError):  # the ledger is on another host, or of an older build
        uses = use_of_leases(run.ledger, leases)
        prompts = PastPrompts(facts_of(run.ledger), run.data)
    steps = {lease: use.weights.keys() for lease, use in uses.items() if use.weights}
    logprobs = trained_logprobs.read(run.path, {step for found in steps.values() for step in found})
    facts = trained_facts.read(run.path, steps)
    return {
        lease: GroupTraining(
            use=uses.get(lease),
            ended=ended,
            facts=facts.get(lease, {}),
            logprobs=logprobs,
            label=_label(prompts, lease),
        )
        for lease in leases
    }


def _label(prompts: PastPrompts | None, lease: int) -> str | None:
    try:
        return None if prompts is None else prompts.of(lease).label
    except StorageError:  # the copy of its data set is gone
        return None


def importance_ratios(t: Trajectory, trained: TrainedLogprobs) -> list[float | None] | None:
    """Return the learner's policy over the one that sampled, for each token; None for one not trained. It
    returns None for log-probs of another number of tokens: they are of a trajectory that had this name in a
    run before."""
    mask = t.loss_mask.copy()
    mask[:1] = False  # nothing predicts the first token
    if int(np.count_nonzero(mask)) != len(trained.logprobs):
        return None
    log_ratios = trained.logprobs.astype(np.float64) - t.behaviour_logprobs[mask]
    cut_off = np.exp(log_ratios.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    ratios: list[float | None] = [None] * len(mask)
    for place, ratio in zip(np.flatnonzero(mask), cut_off, strict=True):
        ratios[place] = float(ratio)
    return ratios
