"""The history of a run: its steps and evaluations, as the rows of metrics.jsonl tell them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite, nan
from pathlib import Path

from storage.metrics.records import Record, integer, number, read_records

SOURCE_REWARD = "source_reward/"
"""What the names begin with of the mean reward of each source that a step trained on."""
MOST = 20_000
"""Steps that are kept; of more, about every other one goes, but for the latest."""
LATEST = 1000
"""Steps of which none is left out."""


@dataclass(frozen=True)
class Step:
    """One optimizer step of reinforcement learning; values that were not reported are NaN."""

    step: int
    time_s: float
    policy_version: int
    trajectories: int
    reward_mean: float
    staleness_mean: float
    staleness_max: float
    step_s: float
    waiting_s: float
    """Time waiting for the batch, within `step_s`."""
    publish_stall_s: float
    """Time waiting for the publication of weights, within `step_s`."""
    mfu: float = nan
    """Share of the GPUs' peak that the updates reached."""
    source_rewards: dict[str, float] = field(default_factory=dict)
    """Mean reward of each source, by its name, where prompts name theirs."""

    @property
    def training_s(self) -> float:
        return max(0.0, self.step_s - self.waiting_s - self.publish_stall_s)


@dataclass(frozen=True)
class Evaluation:
    """Held-out reward of one policy version."""

    policy_version: int
    time_s: float
    sampled: float
    greedy: float
    drawn_by: tuple[int, int]
    """Oldest and newest version that sampled a token of the answers."""
    failed: int
    """Number of failed rollouts, which no mean counts."""
    scores: dict[str, float] = field(default_factory=dict)
    """Further scores, such as pass@4."""
    lag: int = 0
    """Versions that the learner had gone on by when the result came."""

    @property
    def exact(self) -> bool:
        """Tell whether the evaluated version sampled all tokens."""
        return self.drawn_by == (self.policy_version, self.policy_version)

    @property
    def where(self) -> str:
        """Return the version as a screen shows it, with remarks on how it was measured."""
        return f"v{self.policy_version}" + remarks(None if self.exact else self.drawn_by, self.failed)


def remarks(drawn_by: tuple[int, int] | None, failed: int) -> str:
    """Return remarks on an accuracy: the versions that sampled the answers, and how many rollouts failed.
    Empty where `drawn_by` is None, for the version that was to be measured alone, and none failed."""
    texts = []
    if drawn_by is not None:
        oldest, newest = drawn_by
        texts.append(f"drawn by v{oldest}" if oldest == newest else f"drawn by v{oldest} to v{newest}")
    if failed:
        texts.append(f"{failed} rollouts failed" if failed > 1 else "1 rollout failed")
    return f" ({', '.join(texts)})" if texts else ""


def is_step(record: Record) -> bool:
    """Tell whether a line is of an optimizer step of reinforcement learning."""
    return record.get("kind") != "evaluation" and record.get("train/stage") == "rl"


def is_warmup(record: Record) -> bool:
    """Tell whether a line is of a step of the supervised stage."""
    return record.get("kind") != "evaluation" and record.get("train/stage") == "warmup"


def is_evaluation(record: Record) -> bool:
    return record.get("kind") == "evaluation"


def supervised_steps(metrics_path: Path) -> dict[int, Record]:
    """Return the rows of the supervised stage by step; of one that was trained again, the last."""
    return {integer(row, "step"): row for row in read_records(metrics_path) if is_warmup(row)}


def step_of(record: Record) -> Step:
    return Step(
        step=integer(record, "step"),
        time_s=number(record, "time_s"),
        policy_version=integer(record, "train/policy_version"),
        trajectories=integer(record, "train/trajectories"),
        reward_mean=number(record, "reward/mean"),
        staleness_mean=number(record, "staleness/mean_versions"),
        staleness_max=number(record, "staleness/max_versions"),
        step_s=number(record, "time/step_s"),
        waiting_s=number(record, "time/waiting_for_batch_s"),
        publish_stall_s=number(record, "time/publish_stall_s"),
        mfu=number(record, "train/mfu"),
        source_rewards={
            name.removeprefix(SOURCE_REWARD): number(record, name)
            for name in record
            if name.startswith(SOURCE_REWARD)
        },
    )


def evaluation_of(record: Record) -> Evaluation:
    """Return the evaluation that a line is of; `data_set` of the line names what was measured."""
    return Evaluation(
        policy_version=integer(record, "policy_version"),
        time_s=number(record, "time_s"),
        sampled=number(record, "sampled"),
        greedy=number(record, "greedy"),
        drawn_by=(integer(record, "oldest_version"), integer(record, "newest_version")),
        failed=integer(record, "failed"),
        scores={name: number(record, name) for name in record if name.startswith(("pass@", "pass^"))},
        lag=integer(record, "lag_versions"),
    )


class History:
    """Steps and evaluations of a run; a step trained again replaces its earlier record. A long run's steps
    are thinned out: a curve of 20,000 points is as good as one of a million."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.steps: dict[int, Step] = {}
        """Records by step, ascending."""
        self._every = 1
        """Number that divides the numbers of those older steps which are kept."""
        self.evaluations: dict[int, Evaluation] = {}
        """Records of the run's held-out prompts by policy version, ascending."""
        self.sets: dict[str, dict[int, Evaluation]] = {}
        """Records of each further data set, by name, in the same way."""
        for record in records:
            self.add(record)

    @property
    def last(self) -> Step | None:
        return self.steps[next(reversed(self.steps))] if self.steps else None

    @property
    def trains_from(self) -> int | None:
        """Return the version with which reinforcement learning began; it is known from the first step on."""
        return None if self.last is None else self.last.policy_version - self.last.step

    def recent_reward(self, steps: int = 10) -> float:
        """Return the mean reward of the last steps; NaN before the first."""
        last = [step.reward_mean for step in list(self.steps.values())[-steps:] if isfinite(step.reward_mean)]
        return sum(last) / len(last) if last else nan

    def add(self, record: Record) -> None:
        """Add one line of the file; lines that are neither a step nor an evaluation are ignored."""
        if is_evaluation(record):
            self._add_evaluation(record)
        elif is_step(record):
            self._add_step(step_of(record))

    def _add_evaluation(self, record: Record) -> None:
        evaluation, name = evaluation_of(record), record.get("data_set")
        known = self.evaluations if name is None else self.sets.get(str(name), {})
        found = dict(sorted({**known, evaluation.policy_version: evaluation}.items()))
        if name is None:
            self.evaluations = found
        else:
            self.sets[str(name)] = found

    def _add_step(self, step: Step) -> None:
        if self.last is not None and step.step <= self.last.step:
            self._roll_back(step)
        else:
            self.steps[step.step] = step
            if len(self.steps) > MOST:
                self._thin_out()

    def _thin_out(self) -> None:
        """Keep the first step, the latest, and between them those that a power of two divides."""
        first, *older = list(self.steps)[:-LATEST]
        kept = [n for n in older if n % self._every == 0]
        while len(kept) > (MOST - LATEST) // 2:
            self._every *= 2
            kept = [n for n in kept if n % self._every == 0]
        latest = list(self.steps)[-LATEST:]
        self.steps = {n: self.steps[n] for n in (first, *kept, *latest)}

    def _roll_back(self, step: Step) -> None:
        """Drop what followed `step`: a learner resumed before it, so those weights are gone."""
        known = [
            other for other in self.steps.values() if other.step < step.step or other.time_s > step.time_s
        ]
        self.steps = {other.step: other for other in sorted([*known, step], key=lambda s: (s.step, s.time_s))}
        self.evaluations = _left(self.evaluations, step)
        self.sets = {name: _left(evaluations, step) for name, evaluations in self.sets.items()}


def _left(evaluations: dict[int, Evaluation], step: Step) -> dict[int, Evaluation]:
    """Return evaluations that no later weights than those of `step` have drawn, or that came after it."""
    return {
        version: evaluation
        for version, evaluation in evaluations.items()
        if evaluation.drawn_by[1] <= step.policy_version or evaluation.time_s > step.time_s
    }
