"""Held-out accuracy of exactly one policy version, on an engine of its own so that no swap disturbs it."""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from actors.engines.base import Engine, Sampling
from actors.environments.base import Environment, Task
from actors.policy import Policy, Tokenizer
from actors.weights import fetch_state
from bus.blobs import get_blob
from bus.codec import decode, encode
from bus.connection import Bus
from bus.consume import Inbox, consume
from bus.errors import BusError, SluiceError, StorageError
from bus.messages import BlobRef, EvaluationResult, EvaluationTask, Prompt, PromptSet
from bus.publish import Publisher
from storage.blob_sources import Blobs, BlobSource

log = structlog.get_logger()


class Evaluator:
    """Answers evaluation tasks one at a time; its engine is started with the first."""

    def __init__(
        self, bus: Bus, build_engine: Callable[[], Engine], tokenizer: Tokenizer, environment: Environment, *,
        sampled: Sampling, greedy: Sampling, blobs: BlobSource | None = None,
    ) -> None:  # fmt: skip
        self.doing = ""
        self._bus = bus
        self._build_engine = build_engine
        self._tokenizer = tokenizer
        self._sampled = sampled
        self._greedy = greedy
        self._environment = environment
        self._blobs = blobs or Blobs(bus)
        self._publisher = Publisher(bus)
        self._engine: Engine | None = None
        self._prompts: dict[str, Sequence[Prompt]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate until `stop`."""
        inbox = Inbox(self._bus, "TASKS", "evaluation")
        try:
            await consume(inbox, self._bus, EvaluationTask, self._evaluate, stop=stop, concurrency=1)
        finally:
            if self._engine is not None:
                await self._engine.close()

    async def _evaluate(self, task: EvaluationTask) -> None:
        started = time.monotonic()
        version = task.policy.policy_version
        self.doing = f"evaluating version {version}"
        try:
            state = await fetch_state(self._blobs, task.policy)
            prompts = await self._heldout(task.prompts)
        except (
            BusError,
            StorageError,
        ) as error:  # the learner keeps what is to be evaluated; after its restart it is gone
            log.warning("evaluation_skipped", policy_version=version, reason=str(error))
            return
        engine = await self._started_engine()
        await engine.load_weights(state, version)
        result = EvaluationResult(
            policy_version=version,
            incarnation=task.policy.incarnation,
            sampled=await self._accuracy(prompts, Policy(engine, self._tokenizer, self._sampled)),
            greedy=await self._accuracy(prompts, Policy(engine, self._tokenizer, self._greedy)),
            prompts=len(prompts),
            seconds=time.monotonic() - started,
        )
        name = f"evaluation-{task.policy.incarnation}-{version}"
        await self._publisher.publish(
            self._bus.subject("events", "evaluation"), encode(result), message_id=name
        )
        log.info("evaluated", policy_version=version, sampled=result.sampled, greedy=result.greedy)
        self.doing = ""

    async def _accuracy(self, prompts: Sequence[Prompt], policy: Policy) -> float:
        """Mean reward; a rollout that fails, or whose reward is not known at once, counts as 0."""

        async def reward(task: Task) -> float:
            try:
                episode = await self._environment.run(task, policy.fresh(task.task_id))
            except SluiceError as error:
                log.warning("evaluation_rollout_failed", task=task.task_id, reason=str(error))
                return 0.0
            [first, *_] = episode.trajectories
            if first.reward_due:
                log.warning("evaluation_rollout_failed", task=task.task_id, reason="its reward comes later")
            return 0.0 if first.reward_due else first.reward

        rewards = await asyncio.gather(*(reward(_task(n, prompt)) for n, prompt in enumerate(prompts)))
        return sum(rewards) / len(prompts)

    async def _heldout(self, ref: BlobRef) -> Sequence[Prompt]:
        if ref.digest not in self._prompts:
            self._prompts = {ref.digest: decode(await get_blob(self._bus, ref), PromptSet).prompts}
        return self._prompts[ref.digest]

    async def _started_engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._build_engine()
            await self._engine.start()
        return self._engine


def _task(number: int, prompt: Prompt) -> Task:
    return Task(
        task_id=f"heldout-{number}", prompt=prompt.content, label=prompt.label, metadata=prompt.metadata
    )
