"""The connection of a process to the bus and to its run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from bus.config import without_credentials
from bus.connection.bus import Bus
from bus.connection.process_state import ProcessState
from bus.messages import RunRecord
from bus.waiting import cancelled, ended_before
from launch.process.health_server import monitored
from launch.process.ranks import serves_probes
from launch.process.record_trust import restrict_to_own, unsigned_remark
from launch.process.settings_revision import follow_settings, revision_of
from launch.settings.run_config import MonitoringConfig, ProcessConfig, RunConfig, resolve

log = structlog.get_logger()


@asynccontextmanager
async def connected(
    where: ProcessConfig, role: str, stop: asyncio.Event, *, name: str = ""
) -> AsyncIterator[Bus]:
    """Connect to the bus; whoever probes this process is answered while inside, and before it is connected.
    Of a learner's ranks the first one of each host is probed."""
    state = ProcessState(role, where.run)
    state.wait_for(f"the bus at {without_credentials(where.bus.url)}")
    monitoring = where.monitoring if serves_probes() else MonitoringConfig()
    async with (
        monitored(monitoring, state),
        Bus.connect(
            where.bus, where.run, name=name or role, stop=stop, state=state, seen=seen_records(where, role)
        ) as bus,
    ):
        if remark := unsigned_remark(where.bus):
            log.warning("records_not_signed", reason=remark)
        state.wait_for(_FIRST_WAIT.get(role, "the run's storage: is `launch storage` running?"))
        try:
            yield bus
        finally:
            if state.following is not None:
                await cancelled(state.following)


def seen_records(where: ProcessConfig, role: str) -> Path:
    """Return where processes of a role on this host remember which signed records they have taken."""
    return where.directory / where.run / f"seen-{role}.json"


_FIRST_WAIT = {"storage": "its prompts, ledger and shards to be opened"}
"""What a process that is connected waits for first, by its role."""


async def joined(
    bus: Bus, where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event
) -> RunConfig | None:
    """Return the run's configuration from the bus with this process's settings over it; None on `stop`."""
    waiting = asyncio.create_task(
        bus.wait_for(
            "run",
            RunRecord,
            timeout_s=where.bus.join_timeout_s,
            hint=f"is `launch storage --run {where.run}` running on this bus?",
        )
    )
    if not await ended_before(stop, waiting):
        waiting.cancel()
        return None
    own = {
        "run": where.run,
        "directory": where.directory,
        "bus": where.bus.model_dump(),
        "allow": where.allow.model_dump(),
        "monitoring": where.monitoring.model_dump(),
    }

    def resolved(config_json: str) -> RunConfig:
        return resolve(json.loads(config_json), overrides, own)

    config_json = waiting.result().config_json
    config = resolved(config_json)
    restrict_to_own(bus, config, overrides)
    bus.state.revision = revision_of(config_json)
    following = follow_settings(bus, bus.state.role, config, resolved)
    bus.state.following = asyncio.create_task(following, name="follow the run's settings")
    return config
