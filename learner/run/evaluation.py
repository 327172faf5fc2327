"""Held-out reward, measured by the actors on the versions that the learner asks for, or on later ones."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from bus.connection import Bus
from bus.errors import ConfigError
from bus.evaluation_messages import EvaluationResult, EvaluationTask
from bus.messages import BlobRef, PolicyManifest
from bus.streams.publish import Publisher
from bus.waiting import ended_before
from storage.settings.evaluation import EvaluationSetConfig

log = structlog.get_logger()


class HeldOut:
    """Asks for evaluations of one learner's versions and hears their results."""

    def __init__(
        self, bus: Bus, incarnation: str, on_result: Callable[[EvaluationResult], None], patience_s: float,
        sets: Sequence[EvaluationSetConfig] = (), kept_answers: int = 0, samples: int = 1,
    ) -> None:  # fmt: skip
        """Ask on behalf of `incarnation`, also about `sets`, and tell `on_result` what comes of it. The run's
        own prompts have `samples` answers each."""
        self.prompts: BlobRef | None = None
        """The run's held-out prompts, None if it has none; known after `find`."""
        self._sets = sets
        self._kept_answers = kept_answers
        self._samples = samples
        self._wanted: list[tuple[BlobRef, EvaluationSetConfig | None]] = []
        """Prompts of each data set, with its settings; None for those of the held-out prompts."""
        self._bus = bus
        self._incarnation = incarnation
        self._on_result = on_result
        self._patience_s = patience_s
        self._publisher = Publisher(bus)
        self._asked: dict[int, dict[str, asyncio.Event]] = {}
        """One event for each version asked for and each data set, set when its result is here."""

    async def find(self) -> None:
        """Look for the prompts of all data sets, and begin to listen. Raises `ConfigError` where storage has
        none of a set that is configured."""
        found = await self._bus.get_settled("heldout", BlobRef)
        self.prompts = found[0] if found else None
        self._wanted = [] if self.prompts is None else [(self.prompts, None)]
        for one in self._sets:
            prompts = await self._bus.get_settled(f"heldout.{one.name}", BlobRef)
            if prompts is None:
                raise ConfigError(
                    f"evaluation.sets names {one.name!r}, of which storage has no prompts: start storage "
                    "with the same settings"
                )
            self._wanted.append((prompts[0], one))
        await self._bus.listen(self._bus.subject("events", "evaluation"), EvaluationResult, self._hear)

    @property
    def measures(self) -> bool:
        """Return whether there is anything to measure with; known after `find`."""
        return bool(self._wanted)

    async def ask(self, manifest: PolicyManifest) -> None:
        """Ask for the accuracy of a published version on every data set; asking again changes nothing."""
        version = manifest.policy_version
        if version in self._asked:
            return
        tasks = [
            replace(_task(manifest, prompts, one, self._samples), kept_answers=self._kept_answers)
            for prompts, one in self._wanted
        ]
        self._asked[version] = {task.data_set: asyncio.Event() for task in tasks}
        for task in tasks:
            name = f"evaluate-{self._incarnation}-{version}" + (f"-{task.data_set}" if task.data_set else "")
            subject = self._bus.subject("tasks", "evaluation")
            await self._publisher.publish(subject, self._bus.sealed(subject, task), message_id=name)

    def was_asked(self, policy_version: int) -> bool:
        """Return whether this learner has asked for a version."""
        return policy_version in self._asked

    def awaits(self, policy_version: int) -> bool:
        """Return whether a result of a version that was asked for is still to come."""
        return not all(heard.is_set() for heard in self._asked.get(policy_version, {}).values())

    async def measured(self, policy_version: int, stop: asyncio.Event) -> None:
        """Return once all results of a version that was asked for are here, after `patience_s` or on
        `stop`."""
        hearing = asyncio.create_task(self._heard(policy_version))
        if not await ended_before(stop, hearing):
            hearing.cancel()
        elif not hearing.result():
            log.warning("evaluation_missing", policy_version=policy_version, waited_s=self._patience_s)

    async def _heard(self, policy_version: int) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                for heard in self._asked[policy_version].values():
                    await heard.wait()
        return not self.awaits(policy_version)

    def warn_of_missing(self) -> None:
        """Name the versions that were asked for and never heard of: gaps in the curve."""
        missing = [version for version in self._asked if self.awaits(version)]
        if missing:
            log.warning(
                "evaluations_missing",
                policy_versions=missing,
                remedy="the actors' logs say why (evaluation_skipped), or that nobody came to it",
            )

    def _hear(self, result: EvaluationResult) -> None:
        if result.incarnation != self._incarnation:
            return  # of a learner that died: its later versions are not ours
        heard = self._asked.get(result.policy_version, {}).get(result.data_set)
        if heard is not None:
            heard.set()
        self._on_result(result)


def _task(
    manifest: PolicyManifest, prompts: BlobRef, one: EvaluationSetConfig | None, samples: int
) -> EvaluationTask:
    if one is None:
        return EvaluationTask(policy=manifest, prompts=prompts, samples=samples)
    return EvaluationTask(
        policy=manifest,
        prompts=prompts,
        data_set=one.name,
        samples=one.samples,
        pass_at=one.ks,
        solved_at=one.solved_at,
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        max_new_tokens=one.max_new_tokens,
        answered_by=one.answered_by or "",
    )
