"""`launch eval`: a model's answers to held-out prompts, scored as in a run, without one."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.engines.base import Sampling
from actors.environments.base import Environment
from actors.environments.build import built_environment
from actors.environments.failures import EnvironmentFailures, end_after
from actors.episodes.episode import Episode
from actors.episodes.task import Task
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
from launch.evaluation.results import SetResult, result_of
from launch.run_view.run_checkpoint import newest_checkpoint
from launch.services.hidden_files import hidden_files
from launch.settings.run_config import RunConfig
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory
from storage.prompt_files.dataset import encoded_prompts
from storage.settings.evaluation import HELD_OUT, EvaluationSetConfig

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
    """Rollouts that go on at the same time."""
    checkpoint: Path | None = None
    endpoint: ChatEndpointConfig | None = None


@dataclass(frozen=True)
class _Set:
    """A data set with its prompts."""

    settings: EvaluationSetConfig
    prompts: Sequence[Prompt]
    count: int | None

    @property
    def asked(self) -> Sequence[Prompt]:
        """Return the prompts that are asked."""
        return self.prompts[: self.count]


@dataclass(frozen=True)
class _Asked:
    """One answer that is still to be had."""

    data_set: EvaluationSetConfig
    number: int
    sample: int
    task: Task
    sampling: Sampling

    @property
    def key(self) -> tuple[str, int, int]:
        """Return which answer it is, as the file names it."""
        return self.data_set.name, self.number, self.sample


async def evaluate(
    config: RunConfig, stop: asyncio.Event, request: EvaluationRequest, say: Say
) -> list[SetResult]:
    """Ask for all answers that are not there yet, until `stop`; return the results of all that are.

    They are in `results.json` of the directory, too. Raises `ConfigError` for settings that a start refuses,
    where there is nothing to evaluate, and when too many rollouts fail for too long."""
    refuse_other_policies(config)
    with directory_of_checkpoint(request.checkpoint, config) as found, TemporaryDirectory() as scratch:
        checked = _without_training(found)
        prompts = await check_start(checked, RunDirectory(Path(scratch), found.run), models=False)
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
    """Asks for answers, one at a time or several."""

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
    """Ask for each answer that is not in `file`, until `stop`."""
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
    """Yield every answer that is part of the evaluation."""
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
