"""Settings of the evaluation: when it is done, on which data sets, and what counts as best. Without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from bus.config import Config

HELD_OUT = "heldout"
"""Name of the set that `data.heldout` gives, or the run's task."""
ALWAYS = ("sampled", "greedy")
"""Scores that every data set has."""


class EvaluationSetConfig(Config):
    """One more data set of held-out prompts, with what is measured on it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")
    """Name of the set on screens and in metrics: letters, digits, - and _."""
    prompts: Path
    """File of prompts, .jsonl or .parquet, or a slice of one."""
    samples: int = Field(1, ge=1, le=1024)
    """Answers that are sampled to each prompt, n."""
    pass_at: tuple[int, ...] | None = None
    """Numbers k of which pass@k and pass^k are estimated. `None` takes the powers of two up to n, and n."""
    solved_at: float = Field(1.0, allow_inf_nan=False)
    """Reward from which an answer counts as right."""
    reward: str | None = None
    """Reward of its answers, unless the prompts' metadata choose another. The run must allow it:
    `reward` or `rewards` of its environment."""
    environment: str | None = None
    """Environment of its prompts, one of `actors.environments`, unless their metadata choose another. `None`
    is `actors.environment` where they choose none."""
    answered_by: str | None = None
    """Model that answers instead of the policy, for comparison: one of `actors.opponents` with a `path`, or
    of `actors.evaluation.endpoints`. It is measured once, and what came of that stands beside every
    version."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of sampled answers; `None` is that of the rollouts."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass of the likeliest tokens that are kept; `None` is that of the rollouts."""
    top_k: int | None = Field(None, ge=0)
    """Number of the likeliest tokens that are kept; `None` is that of the rollouts."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Upper bound on an answer in tokens; `None` is that of the rollouts."""

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the numbers k, ascending."""
        if self.pass_at is not None:
            return tuple(sorted(set(self.pass_at)))
        return tuple(sorted({1 << n for n in range(self.samples.bit_length())} | {self.samples}))

    @property
    def scores(self) -> tuple[str, ...]:
        """Return the names of what is measured."""
        return (*ALWAYS, *(f"{what}{k}" for k in self.ks for what in ("pass@", "pass^")))

    @model_validator(mode="after")
    def _k_is_within_n(self) -> Self:
        for k in self.pass_at or ():
            if not 1 <= k <= self.samples:
                raise ValueError(
                    f"pass_at has {k}, which {self.samples} samples of a prompt cannot estimate: raise "
                    "samples or leave it out"
                )
        return self


class EvaluationConfig(Config):
    """When the held-out reward is measured, and on what; `actors.evaluation` says how."""

    every_versions: int = Field(10, ge=0)
    """Versions between two evaluations; 0 measures only the first and the last."""
    patience_s: float = Field(300.0, gt=0)
    """Longest time that the learner waits for the accuracy of its present version. It waits at the end, where
    `learner.target_accuracy` seems reached and, with evaluations on the engines that roll out, before the
    first step of reinforcement learning."""
    samples: int = Field(1, ge=1, le=1024)
    """Answers that are sampled to each held-out prompt of `data.heldout`, or of the run's task: the sampled
    reward is their mean. Several make it steadier, which `learner.target_accuracy` is held against."""
    kept_answers: int = Field(256, ge=0)
    """Most answers to each data set that storage keeps of an evaluation, for people: all to the first
    prompts, and to one at least. 0 keeps none."""
    kept_evaluations: int = Field(20, ge=1)
    """Number of evaluations of each data set whose answers are kept, the latest ones."""
    sets: tuple[EvaluationSetConfig, ...] = ()
    """Data sets besides the held-out prompts."""
    best: str | None = None
    """Score by which the best checkpoint is told, as `set/score`: heldout/sampled, aime/pass@8. That
    checkpoint is kept whatever `learner.checkpoint.keep` is, and one is written of each evaluated version.
    `None` tells none."""

    @model_validator(mode="after")
    def _sets_are_apart_and_best_is_one(self) -> Self:
        names = [one.name for one in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sets are named {twice[0]!r}: give each a name of its own")
        if HELD_OUT in names:
            raise ValueError(f"{HELD_OUT!r} is the set that data.heldout gives: choose another name")
        if self.best is not None:
            _refuse_unknown_score(self.best, self.sets)
        return self


def _refuse_unknown_score(best: str, sets: Sequence[EvaluationSetConfig]) -> None:
    scores = {HELD_OUT: ALWAYS, **{one.name: one.scores for one in sets}}
    name, _, score = best.partition("/")
    if name not in scores:
        raise ValueError(f"best={best!r} is of no set; write set/score with one of: {', '.join(scores)}")
    if any(one.name == name and one.answered_by is not None for one in sets):
        raise ValueError(f"best={best!r} is of a model that stays as it is: name a set without answered_by")
    if score not in scores[name]:
        raise ValueError(f"best={best!r}: the scores of {name} are {', '.join(scores[name])}")
