"""Held-out accuracy, measured by the actors on the versions that the learner asks for, or on later ones."""

import asyncio
from collections.abc import Callable

import structlog

from bus.codec import encode
from bus.connection import Bus
from bus.messages import BlobRef, EvaluationResult, EvaluationTask, PolicyManifest
from bus.publish import Publisher
from bus.waiting import ended_before, set_within

log = structlog.get_logger()


class HeldOut:
    """Asks for evaluations of one learner's versions and hears their results."""

    def __init__(
        self, bus: Bus, incarnation: str, on_result: Callable[[EvaluationResult], None], patience_s: float
    ) -> None:
        self.prompts: BlobRef | None = None
        """The run's held-out prompts, None if it has none; known after `find`."""
        self._bus = bus
        self._incarnation = incarnation
        self._on_result = on_result
        self._patience_s = patience_s
        self._publisher = Publisher(bus)
        self._asked: dict[int, asyncio.Event] = {}
        """One event for each version asked for, set when its result is here."""

    async def find(self) -> None:
        """Look for held-out prompts, and begin to listen."""
        found = await self._bus.get("heldout", BlobRef)
        self.prompts = found[0] if found else None
        await self._bus.listen(self._bus.subject("events", "evaluation"), EvaluationResult, self._hear)

    async def ask(self, manifest: PolicyManifest) -> None:
        """Ask for the accuracy of a published version; asking again changes nothing."""
        version = manifest.policy_version
        if self.prompts is None or version in self._asked:
            return
        self._asked[version] = asyncio.Event()
        task = EvaluationTask(policy=manifest, prompts=self.prompts)
        name = f"evaluate-{self._incarnation}-{version}"
        await self._publisher.publish(self._bus.subject("tasks", "evaluation"), encode(task), message_id=name)

    async def measured(self, policy_version: int, stop: asyncio.Event) -> None:
        """Return once the result of a version that was asked for is here, after `patience_s` or on `stop`."""
        hearing = asyncio.create_task(set_within(self._asked[policy_version], self._patience_s))
        if not await ended_before(stop, hearing):
            hearing.cancel()
        elif not hearing.result():
            log.warning("evaluation_missing", policy_version=policy_version, waited_s=self._patience_s)

    def warn_of_missing(self) -> None:
        """Name the versions that were asked for and never heard of: gaps in the curve."""
        missing = [version for version, heard in self._asked.items() if not heard.is_set()]
        if missing:
            log.warning(
                "evaluations_missing",
                policy_versions=missing,
                remedy="the actors' logs say why (evaluation_skipped), or that nobody came to it",
            )

    def _hear(self, result: EvaluationResult) -> None:
        if result.incarnation != self._incarnation:
            return  # of a learner that died: its later versions are not ours
        self._on_result(result)
        if result.policy_version in self._asked:
            self._asked[result.policy_version].set()
