"""The connection of a process to the bus and to its run."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from bus.config import without_credentials
from bus.connection.bus import Bus
from bus.connection.process_state import ProcessState
from bus.connection.roles import living_holder
from bus.errors import BusAwayError
from bus.messages import RunRecord
from bus.waiting import cancelled, ended_before
from launch.process.health_server import monitored
from launch.process.ranks import serves_probes
from launch.process.record_trust import restrict_to_own, unsigned_remark
from launch.process.settings_revision import READ_BY, follow_settings, revision_of
from launch.settings.run_config import MonitoringConfig, ProcessConfig, RunConfig, resolve

log = structlog.get_logger()
LOOK_S = 0.2
"""Time between two looks whether storage has announced the run."""


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
    waiting = asyncio.create_task(_announced(bus, where))
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
    if bus.state.following is not None:  # the process joins again
        await cancelled(bus.state.following)
    following = follow_settings(bus, bus.state.role, config, resolved)
    bus.state.following = asyncio.create_task(following, name="follow the run's settings")
    return config


async def are_announced(bus: Bus, where: RunConfig) -> bool:
    """Return whether storage still announces the settings that this process joined by, in so far as it lives.

    Ask before work begins that storage hears of: until then nothing keeps it from announcing others."""
    return revision_of((await _announced(bus, where)).config_json) == bus.state.revision


async def _announced(bus: Bus, where: RunConfig) -> RunRecord:
    """Return the record of the run, for a process that goes on by its settings once storage that lives has
    announced it: the bus keeps what an earlier storage announced, and the next may announce other settings.
    Without storage for `join_timeout_s` it is taken as it is."""
    hint = f"is `launch storage --run {where.run}` running on this bus?"
    deadline = time.monotonic() + where.bus.join_timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        record = await bus.wait_for("run", RunRecord, timeout_s=left_s, hint=hint)
        if bus.state.role not in READ_BY or not record.announced_by:  # the latter of an earlier build
            return record
        holder = await living_holder(bus, "dispatcher")
        if holder is not None and holder.incarnation == record.announced_by:
            return record
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(LOOK_S)
    if holder is not None:
        raise BusAwayError(
            f"run {where.run!r}: waited {where.bus.join_timeout_s:g} s for the settings that storage on "
            f"{holder.host} is to announce; it opens its prompts, ledger and shards: see its log, or raise "
            "bus.join_timeout_s"
        )
    log.warning("joined_without_storage", run=where.run, waited_s=where.bus.join_timeout_s, hint=hint)
    return record
