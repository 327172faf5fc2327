"""`launch eval`: a model's answers to held-out prompts, scored as in a run, without one."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from tempfile import TemporaryDirectory
from typing import NamedTuple

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import built_environment
from actors.environments.failures import EnvironmentFailures, end_after
from actors.episodes.episode import Episode
from actors.episodes.task import Task
from actors.evaluation.evaluator import pass_all, pass_at
from actors.policy.policy import Policy
from actors.settings.evaluation import ChatEndpointConfig
from bus.codec import Json
from bus.errors import ConfigError, HandBackError, in_short
from bus.messages import Prompt
from bus.process.work_progress import long_work
from bus.trajectory import TRUSTED_ENDS
from bus.waiting import unless
from launch.checks.answering_model import (
    AnsweringModel,
    answering_model,
    directory_of_checkpoint,
    refuse_clients,
    refuse_other_policies,
)
from launch.checks.start_checks import check_start
from launch.evaluation.answers_file import GREEDY, AnswersFile, EvaluationAnswer
from launch.run_view.source_run import newest_checkpoint
from launch.services.hidden_files import hidden_files
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.prompt_files.dataset import encoded_prompts
from storage.settings.evaluation import HELD_OUT, EvaluationSetConfig

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
    # at 0 and 1 the interval ends there, where rounding would leave 2.776e-17
    low, high = (0.0 if mean == 0 else centre - half), (1.0 if mean == 1 else centre + half)
    return Estimate(mean, max(0.0, low), min(1.0, high))


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
    ends: Mapping[str, int]
    tokens: float
    """Mean of sampled tokens over answers."""
    turns: float
    seconds: float

    def to_json(self) -> dict[str, Json]:
        """Return the result as JSON; a score is an object of mean, low and high."""
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
) -> SetResult:
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
    found = defaultdict[int, list[float]](list)
    for prompt, value in values:
        found[prompt].append(value)
    return [*found.values()]


def _mean(of_prompts: Sequence[Sequence[float]]) -> Estimate:
    return mean([fmean(one) for one in of_prompts], sum(map(len, of_prompts)))


def _passes(data_set: EvaluationSetConfig, of_prompts: Sequence[Sequence[float]]) -> dict[str, Estimate]:
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


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What is evaluated, beside the settings of a run."""

    out: Path
    """Directory of the answers, with which the same command goes on."""
    samples: int = 1
    """Answers that are sampled to each held-out prompt; `evaluation.sets` say their own."""
    count: int | None = None
    """Most prompts of each set; None for all."""
    greedy: bool = False
    """Whether each prompt has a greedy answer, too."""
    at_once: int = 32
    checkpoint: Path | None = None
    endpoint: ChatEndpointConfig | None = None


@dataclass(frozen=True)
class _Set:
    settings: EvaluationSetConfig
    prompts: Sequence[Prompt]
    count: int | None

    @property
    def asked(self) -> Sequence[Prompt]:
        return self.prompts[: self.count]


@dataclass(frozen=True)
class _Asked:
    data_set: EvaluationSetConfig
    number: int
    sample: int
    task: Task
    sampling: Sampling

    @property
    def key(self) -> tuple[str, int, int]:
        return self.data_set.name, self.number, self.sample


async def evaluate(
    config: RunConfig, stop: asyncio.Event, request: EvaluationRequest, say: Say
) -> list[SetResult]:
    """Ask for all answers that are not there yet, until `stop`; return the results of all that are. They are
    in `results.json` of the directory, too. Raises `ConfigError` for settings that a start refuses, where
    there is nothing to evaluate, and when too many rollouts fail for too long."""
    refuse_other_policies(config)
    with directory_of_checkpoint(request.checkpoint, config) as found, TemporaryDirectory() as scratch:
        checked = _without_training(found)
        prompts, _ = await check_start(checked, RunDirectory(Path(scratch), found.run), models=False)
        sets = _sets(found, request, {HELD_OUT: prompts.heldout, **prompts.sets})
        name = "" if request.checkpoint is None else str(newest_checkpoint(request.checkpoint))
        identity = _identity(found, sets, name)
        async with answering_model(found, request.endpoint, name) as model:
            with AnswersFile(request.out).opened({**identity, "name": model.name}) as file:
                await _ask(found, stop, request, sets, model, file)
                results = [
                    result_of(one.settings, len(one.asked), file, greedy=request.greedy) for one in sets
                ]
    write_json(request.out / "results.json", [result.to_json() for result in results])
    say("\n".join([f"{model.name}; the answers are in {request.out}", *map(str, results)]))
    if missing := sum(result.missing for result in results):
        say(f"{missing} answers are missing: the same command asks for them")
    return results


def _without_training(config: RunConfig) -> RunConfig:
    """Return settings that need no prompts to train on: where there are none, they are those that measure."""
    data = config.data
    measured = [data.heldout, *(one.prompts for one in config.evaluation.sets)]
    if data.prompts or data.task or data.sources or not any(measured):
        return config
    prompts = next(filter(None, measured))
    return config.model_copy(update={"data": data.model_copy(update={"prompts": prompts})})


@dataclass(frozen=True)
class _Asking:
    model: AnsweringModel
    policies: Mapping[Sampling, Policy]
    environment: Environment
    failures: EnvironmentFailures
    file: AnswersFile

    async def answer(self, one: _Asked) -> None:
        """Have one answer, and keep it. Raises `ConfigError` when too many have failed for too long."""
        started = time.monotonic()
        found = EvaluationAnswer(data_set=one.data_set.name, prompt=one.number, sample=one.sample)
        try:
            episode = await self.environment.run(one.task, self.policies[one.sampling])
        except (HandBackError, MemoryError):
            return  # this process ends, or has nothing left: the next one asks again
        except Exception as error:  # noqa: BLE001 - whatever an environment raises costs its own answer alone
            end = end_after(error)
            found = replace(found, end=end, failure=in_short(f"{type(error).__name__}: {error}"))
            self.failures.failed(one.task, error, end)
        else:
            found = self._of_episode(found, episode)
            self.failures.worked(one.task, episode.fault)
        self.file.add(replace(found, seconds=round(time.monotonic() - started, 3)))

    def _of_episode(self, found: EvaluationAnswer, episode: Episode) -> EvaluationAnswer:
        """Return what came of an episode; one whose reward is not known has failed."""
        parts, [first, *_] = episode.trajectories, episode.trajectories
        reward: float | None = first.reward if episode.outcome is None else episode.outcome
        failure = ""
        if episode.end not in TRUSTED_ENDS or first.reward_due:
            reward = None
            failure = "its reward comes later" if first.reward_due else f"it ended as {episode.end}"
        return replace(
            found,
            reward=reward,
            end=episode.end,
            parts=dict(first.reward_components),
            failure=failure,
            tokens=sum(turn.stop - turn.start for part in parts for turn in part.turns),
            turns=sum(len(part.turns) for part in parts),
            text="\n".join(self.model.text(part.token_ids) for part in parts),
        )


async def _ask(
    config: RunConfig, stop: asyncio.Event, request: EvaluationRequest, sets: Sequence[_Set],
    model: AnsweringModel, file: AnswersFile,
) -> None:  # fmt: skip
    usual = Sampling.from_config(config.sampling, model.stops)
    wanted = [one for one in _wanted(sets, request, usual) if one.key not in file.answers]
    policies = {
        sampling: Policy(
            model.engine, model.tokenizer, sampling, tool_calls=config.actors.tool_calls, images=model.images
        )
        for sampling in {one.sampling for one in wanted}
    }
    async with built_environment(config.actors, stop, hidden_files(config)) as environment:
        refuse_clients(environment)
        failures = EnvironmentFailures(environment, config.actors.failures)
        asking, places = (
            _Asking(model, policies, environment, failures, file),
            asyncio.Semaphore(request.at_once),
        )
        with long_work("evaluating", len(wanted)) as advance:

            async def answered(one: _Asked) -> None:
                async with places:
                    if not stop.is_set():
                        await unless(stop, asking.answer(one))
                        advance(1)

            async with asyncio.TaskGroup() as tasks:
                for one in wanted:
                    tasks.create_task(answered(one))


def _sets(
    config: RunConfig, request: EvaluationRequest, prompts: Mapping[str, Sequence[Prompt]]
) -> list[_Set]:
    """Return the sets, the held-out prompts first. Raises `ConfigError` where there are none."""
    held_out = EvaluationSetConfig(name=HELD_OUT, prompts=Path(HELD_OUT), samples=request.samples)
    named = (_Set(one, prompts[one.name], request.count) for one in (held_out, *config.evaluation.sets))
    if found := [one for one in named if one.prompts]:
        return found
    raise ConfigError("there are no held-out prompts: give --data.heldout, evaluation.sets or --environment")


def _wanted(sets: Sequence[_Set], request: EvaluationRequest, usual: Sampling) -> Iterator[_Asked]:
    greedy = replace(usual, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, keep_masks=False)
    for one in sets:
        settings = one.settings
        own = ("temperature", "top_p", "top_k", "max_new_tokens")
        chosen = {name: value for name in own if (value := getattr(settings, name)) is not None}
        sampled = replace(usual, keep_masks=False, **chosen)
        longest = {name: value for name, value in chosen.items() if name == "max_new_tokens"}
        for number, prompt in enumerate(one.asked):
            for sample in (*((GREEDY,) if request.greedy else ()), *range(settings.samples)):
                sibling = settings.samples if sample == GREEDY else sample
                task = Task.of(prompt, f"{settings.name}-{number}.{sibling}", heldout=True)
                how = replace(greedy, **longest) if sample == GREEDY else sampled
                yield _Asked(settings, number, sample, task, how)


def _identity(config: RunConfig, sets: Sequence[_Set], name: str) -> dict[str, Json]:
    """Return what decides the answers; how many there are may differ from start to start."""
    files = () if name or config.model.path is None else sorted(Path(config.model.path).glob("*.safetensors"))
    environments: dict[str, Json] = {
        key: one.model_dump(mode="json") for key, one in config.actors.by_name.items()
    }
    many = {"samples", "pass_at", "prompts", "solved_at"}
    return {
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "environment": environments,
        "sampling": config.sampling.model_dump(mode="json"),
        "prompts": {
            one.settings.name: blake2b(encoded_prompts(one.prompts, one.settings.name)).hexdigest()[:16]
            for one in sets
        },
        "sets": {one.settings.name: one.settings.model_dump(mode="json", exclude=many) for one in sets},
    }
