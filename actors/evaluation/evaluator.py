"""Measures the held-out accuracy of a policy version."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from actors.engines.base import Engine, Sampling
from actors.environments.base import Environment, Episode, Task, raised_by_environment
from actors.evaluation.engines import EvaluationEngines
from actors.policy.chat_format import Tokenizer
from actors.policy.policy import Policy
from bus.blobs import get_blob
from bus.codec import decode, encode
from bus.connection import Bus
from bus.consume import Inbox, consume
from bus.errors import BusError, EngineError, EngineLostError, HandBackError, StorageError
from bus.messages import BlobRef, EvaluationResult, EvaluationTask, Prompt, PromptSet
from bus.publish import Publisher, together

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Rewards and versions of the answers to one prompt."""

    reward: float
    versions: frozenset[int] = frozenset()
    """Versions of the weights that sampled the tokens."""
    failed: bool = False


class Evaluator:
    """Answers evaluation tasks one at a time."""

    def __init__(
        self, bus: Bus, engines: EvaluationEngines, tokenizer: Tokenizer, environment: Environment, *,
        sampled: Sampling, greedy: Sampling, tool_calls: str = "auto",
    ) -> None:  # fmt: skip
        self.doing = ""
        self._bus = bus
        self._engines = engines
        self._tokenizer = tokenizer
        self._sampled = sampled
        self._greedy = greedy
        self._tool_calls = tool_calls
        self._environment = environment
        self._publisher = Publisher(bus)
        self._prompts: dict[str, Sequence[Prompt]] = {}
        self._stop = asyncio.Event()
        self._latest: tuple[BlobRef, EvaluationResult] | None = None
        """Prompts and result of the evaluation before; None if some of its rollouts failed."""

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate until `stop`."""
        self._stop = stop
        inbox = Inbox(self._bus, "TASKS", "evaluation")
        try:
            await consume(inbox, self._bus, EvaluationTask, self._on_task, stop=stop, concurrency=1)
        finally:
            await self._engines.close()

    async def _on_task(self, task: EvaluationTask) -> None:
        version = task.policy.policy_version
        self.doing = f"evaluating version {version}"
        try:
            result = await self._evaluated(task)
        except EngineLostError:
            raise
        except (BusError, StorageError, EngineError) as error:  # a living learner keeps what is evaluated
            log.warning("evaluation_skipped", policy_version=version, reason=str(error))
        else:
            if result is not None:
                await self._publish(result)
        finally:
            self.doing = ""

    async def _evaluated(self, task: EvaluationTask) -> EvaluationResult | None:
        """Return the result, or None if nobody needs it.

        Raises `BusError` or `StorageError` when prompts or weights cannot be had."""
        started, version = time.monotonic(), task.policy.policy_version
        prompts = await self._heldout(task.prompts)
        engine = await self._engines.with_weights(task.policy, self._stop)
        if engine is None:
            log.warning("evaluation_skipped", policy_version=version, reason="its learner is gone")
            return None
        if known := self._known(task):
            return replace(known, policy_version=version, seconds=time.monotonic() - started)
        sampled = await self._answers(prompts, engine, self._sampled)
        greedy = await self._answers(prompts, engine, self._greedy)
        answers = (*sampled, *greedy)
        versions = frozenset[int]().union(*(answer.versions for answer in answers))
        if not versions:
            log.warning("evaluation_skipped", policy_version=version, reason="no rollout drew a token")
            return None
        if min(versions) < version:
            log.warning("evaluation_skipped", policy_version=version, reason="older weights came meanwhile")
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
            failed=sum(answer.failed for answer in answers),
        )
        self._latest = None if result.failed else (task.prompts, result)
        return result

    def _known(self, task: EvaluationTask) -> EvaluationResult | None:
        """Return the result before if none of its tokens is older than the version asked for.

        It then answers for this version too, so that slow evaluations do not pile up. The learner's current
        version is still measured alone, since no token can have a later version."""
        if self._latest is None:
            return None
        (prompts, result), version = self._latest, task.policy.policy_version
        same = prompts.digest == task.prompts.digest and result.incarnation == task.policy.incarnation
        oldest, newest = result.drawn_by
        answers = oldest == newest == version if self._engines.exact else oldest >= version
        return result if same and answers else None

    async def _publish(self, result: EvaluationResult) -> None:
        name = f"evaluation-{result.incarnation}-{result.policy_version}"
        await self._publisher.publish(
            self._bus.subject("events", "evaluation"), encode(result), message_id=name
        )
        log.info(
            "evaluated",
            policy_version=result.policy_version,
            drawn_by=result.drawn_by,
            sampled=result.sampled,
            greedy=result.greedy,
            failed=result.failed,
        )

    async def _answers(
        self, prompts: Sequence[Prompt], engine: Engine, sampling: Sampling
    ) -> Sequence[_Answer]:
        """Answer every prompt; return one answer for each.

        Raises `HandBackError` when this process is to end before all prompts began and others can do it,
        and `EngineLostError` when no engine is left."""
        policy = Policy(engine, self._tokenizer, sampling, tool_calls=self._tool_calls)
        places = asyncio.Semaphore(self._engines.prompts_at_once or len(prompts))

        async def answer(task: Task) -> _Answer:
            async with places:
                if self._engines.hands_back and self._stop.is_set():
                    raise HandBackError("an evaluation was not finished when this actor was stopped")
                return await self._answer(task, policy)

        return await together(answer(_task(n, prompt)) for n, prompt in enumerate(prompts))

    async def _answer(self, task: Task, policy: Policy) -> _Answer:
        """Answer one prompt. A rollout that fails, or whose reward is not known at once, has reward 0."""
        try:
            episode = await self._environment.run(task, policy.fresh(task.task_id))
        except (EngineLostError, HandBackError, MemoryError):  # not the rollout's fault: another evaluates
            raise
        # Whatever an environment raises costs its own answer alone, as in training.
        except (Exception, SystemExit) as error:
            log.warning(
                "evaluation_rollout_failed",
                task=task.task_id,
                reason=f"{type(error).__name__}: {error}",
                exc_info=raised_by_environment(error),
            )
            return _Answer(reward=0.0, failed=True)
        [first, *_] = episode.trajectories
        if first.reward_due:
            log.warning("evaluation_rollout_failed", task=task.task_id, reason="its reward comes later")
        return _Answer(reward=0.0 if first.reward_due else first.reward, versions=_versions(episode))

    async def _heldout(self, ref: BlobRef) -> Sequence[Prompt]:
        if ref.digest not in self._prompts:
            self._prompts = {ref.digest: decode(await get_blob(self._bus, ref), PromptSet).prompts}
        return self._prompts[ref.digest]


def _accuracy(answers: Sequence[_Answer]) -> float:
    return sum(answer.reward for answer in answers) / len(answers)


def _versions(episode: Episode) -> frozenset[int]:
    """Versions of the weights that sampled the tokens."""
    drawn = (t.policy_versions[t.policy_versions >= 0].tolist() for t in episode.trajectories)
    return frozenset[int]().union(*drawn)


def _task(number: int, prompt: Prompt) -> Task:
    return Task(
        task_id=f"heldout-{number}", prompt=prompt.content, label=prompt.label, metadata=prompt.metadata
    )
