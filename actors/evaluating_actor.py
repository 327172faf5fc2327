"""An actor process that does nothing but evaluate."""

import asyncio
from dataclasses import dataclass

from actors.engines.fleet.engine_claims import EngineClaims
from actors.evaluation.evaluator import Evaluator
from actors.metrics.counters import report_actor, report_end
from actors.other_policies.opponents import Opponents
from actors.run_end import stop_when_done
from bus.codec import Json
from bus.connection import Bus
from bus.connection.status import Activity
from bus.errors import ConfigError, leaves
from bus.messages import PolicyManifest
from bus.waiting import set_within

POLL_S = 2.0


class AnnouncedPolicy:
    """The policy that the learner's notices announce, and the key that it keeps; nothing of it is fetched."""

    def __init__(self, bus: Bus) -> None:
        self.latest: PolicyManifest | None = None
        self._bus = bus

    @property
    def stage(self) -> str:
        """Stage of the learner at its latest publication."""
        return self.latest.stage if self.latest else ""

    async def run(self, stop: asyncio.Event) -> None:
        """Listen until `stop`; the key is looked at too, since a notice may be lost."""
        listening = await self._bus.listen(self._bus.subject("notice", "policy"), PolicyManifest, self._hear)
        while not stop.is_set():
            found = await self._bus.get("policy", PolicyManifest)
            if found is not None:
                self._hear(found[0])
            await set_within(stop, POLL_S * self._bus.slower)
        await listening.unsubscribe()

    def _hear(self, manifest: PolicyManifest) -> None:
        """Take note, unless the same learner has announced a later version."""
        known = self.latest
        if (
            known is None
            or known.incarnation != manifest.incarnation
            or known.policy_version <= manifest.policy_version
        ):
            self.latest = manifest


@dataclass(frozen=True)
class EvaluatingActor:
    """The parts of such a process, run together, and what they show."""

    bus: Bus
    name: str
    evaluator: Evaluator
    opponents: Opponents
    claims: EngineClaims

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate until `stop` or until the learner says that the run is done. Raises EngineLostError for
        opponents that are lost, and `FencedError` for a server that another actor took over."""
        policy, finished = AnnouncedPolicy(self.bus), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(policy.run(finished))
            tasks.create_task(self.opponents.run(lambda: policy.latest, finished))
            tasks.create_task(self.claims.run(finished))
            tasks.create_task(report_actor(self.bus, self._look, finished))
            tasks.create_task(stop_when_done(lambda: policy.stage, lambda: self.opponents.failure, stop))
            try:
                await self.evaluator.run(stop)
            except* ConfigError as group:
                reason = str(next(leaves(group)))
                await report_end(self.bus, source=self.name, look=lambda: (0, {}), reason=reason)
                raise
            finally:
                finished.set()

    def _look(self) -> Activity:
        values: dict[str, Json] = {"opponents": dict(self.opponents.versions), "alarm": self.evaluator.alarm}
        if self.evaluator.doing:
            return Activity(self.evaluator.doing, values)
        return Activity("waiting for versions to evaluate", values, wait="versions")
