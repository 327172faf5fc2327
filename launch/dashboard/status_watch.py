"""How a live run is, asked over its bus as `launch status` asks, no more often than somebody looks."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from bus.codec import Json
from bus.errors import SluiceError
from bus.waiting import cancelled
from launch.dashboard.flow import flow
from launch.dashboard.metrics_source import Locate
from launch.run_view.run_status import RunState, look_at_run
from launch.run_view.units import since
from launch.screens.status_report import report
from storage.disk.file_errors import lack_of_room

log = structlog.get_logger()
PERIOD_S = 2.0
"""Time between two looks; one takes about two seconds."""
AWAY_PERIOD_S = 5.0
"""The same while nothing answers."""
OLD_S = 10.0
"""Age from which answers are not shown: nobody looked meanwhile, and they are asked for anew."""


class StatusWatch:
    """Keeps the latest answers of one run. Nothing is asked while nobody calls `look`."""

    def __init__(self, run: str, locate: Locate) -> None:
        self._run = run
        self._locate = locate
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = -AWAY_PERIOD_S
        self._state: RunState | None = None
        self._problem = ""
        self._answered_s: float | None = None
        """Time of the latest answers, in seconds since the epoch."""
        self.revision = 0
        """Number of answers so far, without old ones."""

    def look(self) -> None:
        """Begin to ask, unless that goes on or was done just now. Raises what a question failed by."""
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None  # first: a failed question must not end later ones
            asking.result()
        period_s = PERIOD_S if self._state is not None else AWAY_PERIOD_S
        age_s = time.monotonic() - self._asked_s
        if self._asking is None and age_s >= OLD_S:
            self._state, self._problem, self.revision = None, "", 0
        if self._asking is None and age_s >= period_s:
            self._asking = asyncio.create_task(self._ask(), name=f"status of {self._run}")

    @property
    def state(self) -> RunState | None:
        """Return the latest answers; None while nothing answers."""
        return self._state

    async def close(self) -> None:
        if self._asking is not None:
            await cancelled(self._asking)

    async def _ask(self) -> None:
        full = ""
        try:
            where = self._locate(self._run)
            full = await asyncio.to_thread(lack_of_room, where.directory / where.run)
            self._state = await look_at_run(where, asyncio.Event())
            self._problem, self._answered_s = "", time.time()
        except SluiceError as error:  # the run is over, or its bus is away: that is what the page says
            log.debug("run_does_not_answer", run=self._run, reason=str(error))
            answered_s = self._answered_s
            last = "" if answered_s is None else f"the run answered last at {since(answered_s, time.time())}"
            self._state, self._problem = None, "; ".join(filter(None, [full, str(error), last]))
        self._asked_s = time.monotonic()
        self.revision += 1

    def payload(self) -> Mapping[str, Json]:
        """Return what the page shows: the report of `launch status` and the flow, or why there is none."""
        if self._state is None:
            return {"live": False, "why": self._problem, "report": None, "flow": []}
        return {"live": True, "why": "", "report": report(self._state), "flow": flow(self._state)}
