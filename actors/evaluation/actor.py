"""An actor process that does nothing but evaluate."""

import asyncio
from dataclasses import dataclass

from actors.engines.fleet.engine_claims import EngineClaims
from actors.evaluation.evaluator import Evaluator
from actors.opponents.opponents import Opponents
from actors.run_end import stop_when_done
from actors.weights.announced import AnnouncedPolicy
from bus.codec import Json
from bus.connection import Bus
from bus.connection.status import report_status


@dataclass(frozen=True)
class EvaluatingActor:
    """The parts of such a process, run together, and what they show."""

    bus: Bus
    name: str
    """Name of the process among the run's actors."""
    evaluator: Evaluator
    opponents: Opponents
    claims: EngineClaims

    async def run(self, stop: asyncio.Event) -> None:
        """Evaluate until `stop` or until the learner says that the run is done.

        Raises EngineLostError for opponents that are lost, and `FencedError` for a server that another actor
        took over."""
        policy, finished = AnnouncedPolicy(self.bus), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(policy.run(finished))
            tasks.create_task(self.opponents.run(lambda: policy.latest, finished))
            tasks.create_task(self.claims.run(finished))
            tasks.create_task(
                report_status(self.bus, source=self.name, role="actor", look=self._look, stop=finished)
            )
            tasks.create_task(stop_when_done(lambda: policy.stage, lambda: self.opponents.failure, stop))
            try:
                await self.evaluator.run(stop)
            finally:
                finished.set()

    def _look(self) -> tuple[str, dict[str, Json]]:
        doing = self.evaluator.doing or "waiting for versions to evaluate"
        return doing, {"opponents": dict(self.opponents.versions)}
