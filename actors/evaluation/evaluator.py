"""Measures the held-out reward of a policy version."""

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from statistics import fmean

import numpy as np
import structlog

from actors.engines.base import Engine, Sampling
from actors.environments.base import Environment
from actors.environments.failures import EnvironmentFailures, end_after
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError, raised_by_environment
from actors.episodes.sent_trajectories import PlacedPart, trajectories_of
from actors.episodes.task import Task
from actors.evaluation.engines import EvaluationEngines
from actors.policy.chat_format import Tokenizer
from actors.policy.other_engines import ALONE, OtherEngines
from actors.policy.policy import Policy
from actors.settings.groups import FailureLimitsConfig, InterruptionConfig
from bus.codec import decode, encode
from bus.connection import Bus
from bus.errors import BusError, EngineError, EngineLostError, HandBackError, StorageError, in_short
from bus.evaluation_messages import EvaluationResult, EvaluationTask, HeldOutAnswers, PromptSet
from bus.messages import BlobRef, Lease, Prompt
from bus.process.plugins import RAISED
from bus.streams.blob_store import get_blob
from bus.streams.consume import Inbox, consume
from bus.streams.publish import Publisher, together
from bus.trajectory import TRUSTED_ENDS, End, TrajectoryBatch
from bus.waiting import is_cancelled, unless
from storage.images.chat import ImageChat


def pass_at(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: that at least one of k samples is right. It is 1 - C(n - c, k)
    / C(n, k) with n `samples` of which c are `right`, as a product of numbers below 1, which neither
    overflows nor cancels (arXiv:2107.03374, equation 1 and figure 3)."""
    _refuse_impossible(samples, right, k)
    if samples - right < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(samples - right + 1, samples + 1))


def pass_all(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass^k: that all of k samples are right. It is C(c, k) / C(n, k)
    (arXiv:2406.12045, section 3)."""
    _refuse_impossible(samples, right, k)
    return prod((right - i) / (samples - i) for i in range(k)) if right >= k else 0.0


def _refuse_impossible(samples: int, right: int, k: int) -> None:
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(
            f"{right} right of {samples} samples say nothing of {k}: k is between 1 and the samples"
        )


log = structlog.get_logger()
LATE = "its reward comes later"
KEPT_SETS = 8
"""Data sets whose prompts are kept in memory."""


@dataclass(frozen=True, slots=True)
class _Answer:
    reward: float | None
    """None where something around the policy failed, so that no reward says anything about it."""
    versions: frozenset[int] = frozenset()
    """Versions of the weights that sampled the tokens."""
    failure: str = ""
    episode: Episode | None = None
    """The episode, where it is kept."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorParts:
    """What an evaluator answers held-out prompts with, beside its engines, and its limits."""

    sampled: Sampling
    greedy: Sampling
    tool_calls: str = "auto"
    others: OtherEngines = ALONE
    """Other policies: each that the run trains plays with its newest weights."""
    images: ImageChat | None = None
    """Images that the model reads, where it does."""
    endpoints: Mapping[str, Engine] = field(default_factory=dict)
    """Models behind endpoints by name, which answer data sets that ask for them."""
    finish_within_s: float = InterruptionConfig().finish_within_s
    """Longest time that prompts which were begun may go on after the stop, where they may at all."""
    limits: FailureLimitsConfig = field(default_factory=FailureLimitsConfig)
    """When failed rollouts of a data set end this process, and so the run."""


class Evaluator:
    """Answers evaluation tasks one at a time."""

    def __init__(
        self, bus: Bus, engines: EvaluationEngines, tokenizer: Tokenizer, environment: Environment,
        parts: EvaluatorParts,
    ) -> None:  # fmt: skip
        self.doing = ""
        self.parts = parts
        self._bus = bus
        self._engines = engines
        self._tokenizer = tokenizer
        self._environment = environment
        self._publisher = Publisher(bus)
        self._prompts: dict[str, Sequence[Prompt]] = {}
        self._stop = asyncio.Event()
        self._unsent: list[HeldOutAnswers] = []
        """Answers of the evaluation that goes on, for storage to keep."""
        self._latest: dict[str, tuple[EvaluationTask, EvaluationResult]] = {}
        """Latest task and result of each data set, without those of which rollouts failed."""
        self._failures: dict[str, EnvironmentFailures] = {}
        """Failed rollouts by data set, each of which is judged by itself."""
        self._skipped: dict[str, str] = {}
        """Why the latest evaluation of a data set has no result, in words."""

    @property
    def alarm(self) -> str:
        """Return in words of which data sets the latest evaluation failed, and how; empty for none."""
        judged = {name: failures.alarm for name, failures in self._failures.items() if failures.alarm}
        return "; ".join({**self._skipped, **judged}.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate until `stop`. Raises `ConfigError` when an environment or reward fails too often."""
        self._stop = stop
        inbox = Inbox(self._bus, "TASKS", "evaluation")
        try:
            await consume(inbox, self._bus, EvaluationTask, self._on_task, stop=stop, concurrency=1)
        finally:
            await self._engines.close()
            for endpoint in self.parts.endpoints.values():
                await endpoint.close()

    async def _on_task(self, task: EvaluationTask) -> None:
        version = task.policy.policy_version
        on = f" on {task.data_set}" if task.data_set else ""
        self.doing, self._unsent = f"evaluating version {version}{on}", []
        try:
            result = await self._evaluated_unless_stopped(task)
        except EngineLostError:
            raise
        except (BusError, StorageError, EngineError) as error:  # a living learner keeps what is evaluated
            self._skip(task, str(error), alarms=isinstance(error, EngineError))
        else:
            if result is not None:
                await self._publish(result)
                await self._send_answers(result)
        finally:
            self.doing = ""

    async def _evaluated_unless_stopped(self, task: EvaluationTask) -> EvaluationResult | None:
        """Return as `_evaluated` does. Raises `HandBackError` where the stop of this process comes first,
        and the time that the engines have after it ends, too."""
        after_s = self.parts.finish_within_s if self._engines.finishes_begun else 0.0
        result = await unless(self._stop, self._evaluated(task), after_s=after_s)
        if result is None and self._stop.is_set():
            raise _stopped()
        return result

    async def _evaluated(self, task: EvaluationTask) -> EvaluationResult | None:
        """Return the result, or None if nobody needs it. Raises `BusError` or `StorageError` when prompts or
        weights cannot be had."""
        started, version = time.monotonic(), task.policy.policy_version
        prompts = await self._heldout(task.prompts)
        engine = await self._engine_of(task)
        if engine is None:
            self._skip(task, "the learner is gone")
            return None
        if known := self._known(task):
            return replace(known, policy_version=version, seconds=time.monotonic() - started)
        failures = self._failures_of(task.data_set)
        failures.forget_judged()
        tasks, once = (_tasks(task.data_set, prompts, samples) for samples in (task.samples, 1))
        try:
            sampled = await self._answers(
                tasks, engine, _sampling(task, self.parts.sampled), failures,
                version=version, kept=task.kept_prompts * task.samples,
            )  # fmt: skip
            greedy = await self._answers(
                once, engine, _sampling(task, self.parts.greedy, temperature=0.0), failures,
                version=version, kept=task.kept_prompts,
            )  # fmt: skip
        except EngineLostError as error:
            raise await self._engines.after_loss(task.policy, error) from error
        answers = (*sampled, *greedy)
        failed = sum(answer.reward is None for answer in answers)
        versions = frozenset[int]().union(*(answer.versions for answer in answers))
        if not versions or not _mostly_answered(sampled) or not _mostly_answered(greedy):
            last = next((answer.failure for answer in reversed(answers) if answer.failure), "none")
            reason = f"{failed} of {len(answers)} rollouts failed, the last: {in_short(last)}"
            self._skip(task, reason, alarms=True)
            return None
        if task.answered_by:
            versions = frozenset({version})  # versions of the answering model are of another count
        if min(versions) < version:
            self._skip(task, "older weights came meanwhile")
            return None
        result = EvaluationResult(
            policy_version=version,
            incarnation=task.policy.incarnation,
            sampled=_accuracy(sampled),
            greedy=_accuracy(greedy),
            prompts=len(prompts),
            seconds=time.monotonic() - started,
            oldest_version=min(versions),
            newest_version=max(versions),
            failed=failed,
            data_set=task.data_set,
            samples=task.samples,
            scores=_scores(task, sampled),
        )
        self._unsent = _kept_answers(task, prompts, sampled, greedy)
        self._skipped.pop(task.data_set, None)
        self._latest.pop(task.data_set, None)
        if not result.failed:
            self._latest[task.data_set] = task, result
        return result

    def _skip(self, task: EvaluationTask, reason: str, *, alarms: bool = False) -> None:
        """Log why a version has no result; with `alarms` screens show it until the data set has one."""
        version = task.policy.policy_version
        log.warning("evaluation_skipped", policy_version=version, data_set=task.data_set, reason=reason)
        if alarms:
            self._skipped[task.data_set] = (
                f"{_said(task.data_set)}: version {version} has no result: {reason}"
            )

    def _failures_of(self, data_set: str) -> EnvironmentFailures:
        if data_set not in self._failures:
            self._failures[data_set] = EnvironmentFailures(
                self._environment, self.parts.limits, serves=lambda: self._engines.serves, of=_said(data_set)
            )
        return self._failures[data_set]

    async def _engine_of(self, task: EvaluationTask) -> Engine | None:
        """Return who answers, as `with_weights` does. Raises EngineError for one who is not here."""
        if not task.answered_by:
            return await self._engines.with_weights(task.policy, self._stop)
        others = {**self.parts.others.opponents, **self.parts.endpoints}
        if task.answered_by not in others:
            there = ", ".join(others) or "none"
            raise EngineError(f"{task.answered_by!r} is no opponent of this actor: there are {there}")
        return others[task.answered_by]

    def _known(self, task: EvaluationTask) -> EvaluationResult | None:
        """Return the result before if none of its tokens is older than the version asked for.

        It then answers for this version too, so that slow evaluations do not pile up. The learner's current
        version is still measured alone, since no token can have a later version. One result of a model that
        stays as it is answers for every version."""
        if task.data_set not in self._latest:
            return None
        (before, result), version = self._latest[task.data_set], task.policy.policy_version
        same = replace(before, policy=task.policy) == task
        if task.answered_by:
            learner = task.policy.incarnation
            again = replace(result, incarnation=learner, oldest_version=version, newest_version=version)
            return again if same else None
        same = same and result.incarnation == task.policy.incarnation
        oldest, newest = result.drawn_by
        answers = oldest == newest == version if self._engines.exact else oldest >= version
        return result if same and answers else None

    async def _send_answers(self, result: EvaluationResult) -> None:
        """Give storage answers to keep. Nobody waits for them: what cannot be sent is left out."""
        of = f"{result.incarnation}-{result.policy_version}-{result.data_set}"
        subject = self._bus.subject("outcomes", "answers")
        try:
            for one in self._unsent:
                await self._publisher.publish(subject, encode(one), message_id=f"answers-{of}-{one.prompt}")
        except BusError as error:
            log.warning("answers_not_sent", data_set=result.data_set, reason=str(error))

    async def _publish(self, result: EvaluationResult) -> None:
        name = f"evaluation-{result.incarnation}-{result.policy_version}"
        if result.data_set:
            name = f"{name}-{result.data_set}"
        await self._publisher.publish(
            self._bus.subject("events", "evaluation"), encode(result), message_id=name
        )
        log.info(
            "evaluated",
            policy_version=result.policy_version,
            data_set=result.data_set,
            drawn_by=result.drawn_by,
            sampled=result.sampled,
            greedy=result.greedy,
            failed=result.failed,
            **result.scores,
        )

    async def _answers(
        self, tasks: Sequence[Task], engine: Engine, sampling: Sampling, failures: EnvironmentFailures, *,
        version: int, kept: int,
    ) -> Sequence[_Answer]:  # fmt: skip
        """Carry out every task; return one answer for each, and note in `failures` what fails.

        Engines take these requests after those of leases that are older than `version`. The first `kept`
        answers have what was said.

        Raises `HandBackError` when this process is to end before all of them began,
        and `EngineLostError` when no engine is left."""
        policy = Policy(
            engine, self._tokenizer, sampling,
            tool_calls=self.parts.tool_calls, images=self.parts.images, others=self.parts.others,
        ).fresh("heldout", lease_version=version)  # fmt: skip
        places = asyncio.Semaphore(self._engines.prompts_at_once or len(tasks))

        async def answer(number: int, task: Task) -> _Answer:
            async with places:
                if self._stop.is_set():
                    raise _stopped()
                found = await self._answer(task, policy, failures)
                return found if number < kept else replace(found, episode=None)

        return await together(answer(number, task) for number, task in enumerate(tasks))

    async def _answer(self, task: Task, policy: Policy, failures: EnvironmentFailures) -> _Answer:
        """Answer one prompt. A rollout that fails, or whose reward is not known at once, has no reward.
        Raises `ConfigError` when too many have failed for too long."""
        try:
            episode = await self._environment.run(task, policy.fresh(task.task_id))
        except (EngineLostError, HandBackError, MemoryError):  # not the rollout's fault: another evaluates
            raise
        # Whatever an environment raises costs its own answer alone, as in training.
        except (*RAISED, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return self._failed(task, error, end_after(error), failures)
        [first, *_] = episode.trajectories
        if first.reward_due:  # as the environment is meant to be, though an evaluation cannot wait for it
            log.warning("evaluation_rollout_failed", task=task.task_id, reason=LATE)
            return _Answer(reward=None, failure=LATE, episode=episode)
        if episode.end not in TRUSTED_ENDS:
            failed = self._failed(task, EpisodeError(f"it ended as {episode.end}"), episode.end, failures)
            return replace(failed, episode=episode)
        failures.worked(task, episode.fault)
        others = self.parts.others.names
        own = next((part for part in episode.trajectories if part.policy not in others), first)
        reward = own.reward if episode.outcome is None else episode.outcome
        counted = replace(own, reward=reward)
        said = tuple(counted if part is own else part for part in episode.trajectories)
        return _Answer(reward, _versions(episode, others), episode=replace(episode, trajectories=said))

    def _failed(self, task: Task, error: BaseException, end: End, failures: EnvironmentFailures) -> _Answer:
        reason = f"{type(error).__name__}: {error}"
        log.warning(
            "evaluation_rollout_failed",
            task=task.task_id,
            reason=reason,
            exc_info=raised_by_environment(error),
        )
        failures.failed(task, error, end)
        return _Answer(reward=None, failure=reason, episode=FailedEpisode(end, reason).as_episode(1))

    async def _heldout(self, ref: BlobRef) -> Sequence[Prompt]:
        if ref.digest not in self._prompts:
            while len(self._prompts) >= KEPT_SETS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[ref.digest] = decode(await get_blob(self._bus, ref), PromptSet).prompts
        return self._prompts[ref.digest]


def _kept_answers(
    task: EvaluationTask, prompts: Sequence[Prompt], sampled: Sequence[_Answer], greedy: Sequence[_Answer]
) -> list[HeldOutAnswers]:
    return [
        _held_out_answers(
            task, number, prompts[number], [*sampled[number * task.samples :][: task.samples], one]
        )
        for number, one in enumerate(greedy[: task.kept_prompts])
    ]


def _held_out_answers(
    task: EvaluationTask, number: int, prompt: Prompt, answers: Sequence[_Answer]
) -> HeldOutAnswers:
    """Return the answers to a prompt as trajectories of which nothing is trained, without what only training
    needs."""
    parts = [
        (
            rollout,
            replace(
                part, trainable=False, loss_mask=np.zeros_like(part.loss_mask), routed_experts=None, kept=None
            ),
        )
        for rollout, answer in enumerate(answers)
        if answer.episode is not None
        for part in answer.episode.trajectories
    ]
    version = task.policy.policy_version
    lease = Lease(lease_id=number, prompt=prompt, samples=len(answers), policy_version=version)
    placed = [PlacedPart(place, *one) for place, one in enumerate(parts)]
    return HeldOutAnswers(
        policy_version=version,
        prompt=number,
        batch=TrajectoryBatch.of(trajectories_of(lease, placed, size=len(placed))),
        data_set=task.data_set,
        label=prompt.label,
    )


def _said(data_set: str) -> str:
    return f"evaluation.sets {data_set!r}" if data_set else "held-out prompts"


def _stopped() -> HandBackError:
    return HandBackError("an evaluation was not finished when this actor was stopped")


def _accuracy(answers: Sequence[_Answer]) -> float:
    """Return the mean reward of answers that did not fail: a failure says nothing about the policy."""
    return fmean(answer.reward for answer in answers if answer.reward is not None)


def _mostly_answered(answers: Sequence[_Answer]) -> bool:
    """Return whether at most half of the answers failed; the mean of a few would be taken for that of all."""
    return 2 * sum(answer.reward is None for answer in answers) <= len(answers)


def _versions(episode: Episode, others: Set[str]) -> frozenset[int]:
    """Versions of the weights that sampled the tokens, but for those of other policies."""
    measured = (t for t in episode.trajectories if t.policy not in others)
    drawn = (t.policy_versions[t.policy_versions >= 0].tolist() for t in measured)
    return frozenset[int]().union(*drawn)


def _tasks(data_set: str, prompts: Sequence[Prompt], samples: int) -> list[Task]:
    name = f"heldout-{data_set}-" if data_set else "heldout-"
    return [
        Task.of(prompt, f"{name}{number}" + (f".{sample}" if samples > 1 else ""), heldout=True)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def _sampling(task: EvaluationTask, usual: Sampling, *, temperature: float | None = None) -> Sampling:
    """Return the sampling of a data set: what it does not choose is as usual. Which tokens were kept is not
    asked for: nothing is trained, and servers that only evaluate need not tell."""
    chosen = {
        "temperature": task.temperature if temperature is None else temperature,
        "top_p": task.top_p,
        "top_k": task.top_k,
        "max_new_tokens": task.max_new_tokens,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return replace(usual, keep_masks=False, **chosen)  # type: ignore[arg-type]  # each has its field's type


def _scores(task: EvaluationTask, sampled: Sequence[_Answer]) -> dict[str, float]:
    """Return pass@k and pass^k, each the mean over the prompts of which at least k rollouts did not fail."""
    scores = dict[str, float]()
    answered = [
        [answer.reward >= task.solved_at for answer in of_prompt if answer.reward is not None]
        for of_prompt in (sampled[n : n + task.samples] for n in range(0, len(sampled), task.samples))
    ]
    for k in task.pass_at:
        enough = [(len(right), sum(right)) for right in answered if len(right) >= k]
        if enough:
            scores[f"pass@{k}"] = fmean(pass_at(n, right, k) for n, right in enough)
            scores[f"pass^{k}"] = fmean(pass_all(n, right, k) for n, right in enough)
    return scores
