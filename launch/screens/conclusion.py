"""What is made of a run at its end: learning curves and the summary, from what storage has recorded."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from bus.connection.bus import Bus
from bus.messages import Status
from bus.waiting import cancelled
from launch.run_view.alert_calls import AlertCalls
from launch.run_view.history import History
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.run_files import RunFiles
from launch.screens.curves import draw_curves
from launch.screens.summary import Summary, summarise, write_summary
from launch.settings.run_config import RunConfig
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import read_records

log = structlog.get_logger()
LOOK_S = 1.0


@asynccontextmanager
async def concluding(bus: Bus, config: RunConfig, run: RunDirectory) -> AsyncIterator[None]:
    """Draw the curves and write the summary when the learner is done, and again when the body has ended.
    Storage does it for a run of several hosts. It hears the learner and itself only: many actors would keep
    it busy."""
    monitor = RunMonitor(RunSettings.of_run(config))
    for role in ("learner", "storage"):
        await bus.listen(bus.subject("status", role), Status, monitor.on_status)
    waiting = asyncio.create_task(_conclude_when_done(config, run, monitor), name="conclude when done")
    alerting = asyncio.create_task(AlertCalls(config).watch(monitor, asyncio.Event()), name="alerts")
    try:
        yield
    finally:
        await cancelled(waiting, alerting)
    if not waiting.cancelled():
        waiting.result()  # raises what the task failed by
    if monitor.values("learner") or not run.summary.exists():  # else the summary that is there says more
        await asyncio.to_thread(_conclude_recorded, config, run, monitor)


async def _conclude_when_done(config: RunConfig, run: RunDirectory, monitor: RunMonitor) -> None:
    """Wait until the learner is done and says no more: by then its last metrics are recorded."""
    while not monitor.learner_has_ended:  # noqa: ASYNC110 - silence is no event
        await asyncio.sleep(LOOK_S)
    await asyncio.to_thread(_conclude_recorded, config, run, monitor)


def _conclude_recorded(config: RunConfig, run: RunDirectory, monitor: RunMonitor) -> None:
    if not run.metrics.exists():
        return  # nothing was trained
    monitor.history = History(read_records(run.metrics))
    conclude(config, run, monitor, monitor.elapsed_s)
    log.info("summary_written", summary=str(run.summary), curves=str(run.curves))


def conclude(config: RunConfig, run: RunDirectory, monitor: RunMonitor, wall_s: float) -> Summary:
    if run.metrics.exists():
        draw_curves(
            run.metrics,
            run.curves,
            title=f"Run {config.run}",
            max_staleness=config.admission.max_staleness,
            target_accuracy=config.learner.target_accuracy,
        )
    checkpoints = sorted(run.checkpoints.glob("step*"))
    summary = summarise(
        monitor,
        run=run,
        progress=RunFiles(run.path).progress,
        checkpoint=checkpoints[-1] if checkpoints else None,
        wall_s=wall_s,
    )
    write_summary(run, summary)
    return summary
