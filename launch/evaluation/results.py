"""What an evaluation found: rewards, pass@k and pass^k with intervals."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import fmean, variance
from typing import NamedTuple

from actors.evaluation.evaluator import pass_all, pass_at
from bus.codec import Json
from launch.evaluation.answers_file import GREEDY, AnswersFile, EvaluationAnswer
from storage.settings.evaluation import EvaluationSetConfig

Z_95 = 1.959963984540054
"""Quantile of the normal distribution that leaves 2.5 % above it."""


class Estimate(NamedTuple):
    """A mean with the interval that contains the true one with a probability of about 95 %."""

    mean: float
    low: float
    high: float


def share(of_prompts: Sequence[float], answers: int) -> Estimate:
    """Return the mean of shares, one of each prompt, each between 0 and 1, and Wilson's interval of it.

    Wilson's interval (doi:10.1080/01621459.1927.10502953) is that of n independent answers which are right or
    wrong. Here n is the number of such answers whose mean varies as the mean over these prompts does: answers
    to one prompt are alike, and count less (the design effect of clusters, as in arXiv:2411.00640, section
    2.2). It is the number of prompts where they do not differ, and all are right or all wrong.

    Args:
        of_prompts: one share for each prompt, at least one.
        answers: number of all answers, which `n` does not exceed."""
    count, mean = len(of_prompts), fmean(of_prompts)
    spread = variance(of_prompts) if count > 1 else 0.0
    n = float(count)
    if spread > 0:
        n = min(float(answers), count * mean * (1 - mean) / spread)
    elif 0 < mean < 1:
        n = float(answers)
    centre = (mean + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * sqrt(mean * (1 - mean) / n + Z_95**2 / (4 * n**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean(of_prompts: Sequence[float], answers: int) -> Estimate:
    """Return the mean of any numbers, one of each prompt, with its interval: as `share` where all lie between
    0 and 1, else the normal one by their standard error (arXiv:2411.00640, section 2.1), which has no width
    where there is one prompt."""
    if all(0 <= one <= 1 for one in of_prompts):
        return share(of_prompts, answers)
    found = fmean(of_prompts)
    half = Z_95 * sqrt(variance(of_prompts) / len(of_prompts)) if len(of_prompts) > 1 else 0.0
    return Estimate(found, found - half, found + half)


@dataclass(frozen=True)
class SetResult:
    """The results of one data set."""

    name: str
    prompts: int
    samples: int
    scores: Mapping[str, Estimate]
    """Mean reward as `reward` and `greedy`, its parts as `part/NAME`, and `pass@k` and `pass^k`, each over
    the prompts that have enough answers."""
    missing: int
    """Answers that nobody has given yet, those that failed included."""
    failures: Sequence[str]
    """Why answers failed this time."""
    ends: Mapping[str, int]
    """Number of answers by how they ended."""
    tokens: float
    """Mean of sampled tokens over answers."""
    turns: float
    seconds: float

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON; a score is an object of mean, low and high."""
        return {**asdict(self), "scores": {name: one._asdict() for name, one in self.scores.items()}}

    def __str__(self) -> str:
        head = f"{self.name}: {self.prompts} prompts, {self.samples} answers each"
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.items())
        rows = [
            f"  {name:<20} {one.mean:8.4g}   95 %: {one.low:.4g} to {one.high:.4g}"
            for name, one in self.scores.items()
        ]
        if self.failures:
            rows.append(f"  {len(self.failures)} answers failed, the last: {self.failures[-1]}")
        means = f"{self.tokens:.1f} tokens, {self.turns:.1f} turns, {self.seconds:.2f} s"
        return "\n".join([head, *rows, f"  {means} in the mean; ends: {ends or 'none'}"])


def result_of(
    data_set: EvaluationSetConfig, prompts: int, file: AnswersFile, *, greedy: bool = False
) -> SetResult:  # fmt: skip
    """Return the results of the first `prompts` of a data set by the answers so far; `greedy` says whether
    each is to have a greedy one, too."""
    answers = file.answers.values()
    of_set = [one for one in answers if one.data_set == data_set.name and one.prompt < prompts]
    sampled = [one for one in of_set if 0 <= one.sample < data_set.samples]
    greedily = [one for one in of_set if one.sample == GREEDY]
    counted = [*sampled, *greedily]
    rewards = _by_prompt((one.prompt, _reward(one)) for one in sampled)
    scores = {"reward": _mean(rewards)} if rewards else {}
    if greedily:
        scores["greedy"] = _mean([[_reward(one)] for one in greedily])
    scores |= _passes(data_set, rewards)
    for part in sorted({part for one in sampled for part in one.parts}):
        of_part = _by_prompt((one.prompt, one.parts[part]) for one in sampled if part in one.parts)
        scores[f"part/{part}"] = _mean(of_part)
    return SetResult(
        name=data_set.name,
        prompts=prompts,
        samples=data_set.samples,
        scores=scores,
        missing=prompts * (data_set.samples + greedy) - len(sampled) - greedy * len(greedily),
        failures=file.failures.get(data_set.name, []),
        ends=dict(Counter(answer.end for answer in counted).most_common()),
        tokens=_mean_of(counted, lambda answer: answer.tokens),
        turns=_mean_of(counted, lambda answer: answer.turns),
        seconds=_mean_of(counted, lambda answer: answer.seconds),
    )


def _by_prompt(values: Iterable[tuple[int, float]]) -> list[list[float]]:
    """Return the values of each prompt that has one."""
    found = defaultdict[int, list[float]](list)
    for prompt, value in values:
        found[prompt].append(value)
    return [*found.values()]


def _mean(of_prompts: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over prompts of the mean over their answers."""
    return mean([fmean(one) for one in of_prompts], sum(map(len, of_prompts)))


def _passes(data_set: EvaluationSetConfig, of_prompts: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Return pass@k and pass^k over the prompts that have at least k answers."""
    right = [(len(rewards), sum(one >= data_set.solved_at for one in rewards)) for rewards in of_prompts]
    scores = {}
    for k in data_set.ks:
        enough = [(n, c) for n, c in right if n >= k]
        independent = sum(n for n, _ in enough) // k
        for what, estimate in (("pass@", pass_at), ("pass^", pass_all)):
            if enough and not (what == "pass^" and k == 1):  # which is pass@1
                scores[f"{what}{k}"] = share([estimate(n, c, k) for n, c in enough], independent)
    return scores


def _reward(answer: EvaluationAnswer) -> float:
    assert answer.reward is not None  # others are not kept
    return answer.reward


def _mean_of(answers: Sequence[EvaluationAnswer], value: Callable[[EvaluationAnswer], float]) -> float:
    return fmean(map(value, answers)) if answers else 0.0
