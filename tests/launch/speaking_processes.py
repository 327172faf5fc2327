"""Processes of a run that send their status."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.codec import Message
from bus.connection.bus import Bus
from bus.connection.status import Activity, report_status
from bus.messages import RunRecord, Status
from bus.requests import StepGroups, StepGroupsRequest, StoredGroups, StoredRequest
from launch.settings.run_config import validate

CONFIG = validate({"run": "test", "replay": {"shards": 2}, "admission": {"groups_per_step": 20}})


@asynccontextmanager
async def speaking(bus: Bus, *statuses: Status) -> AsyncIterator[None]:
    """Send these as their processes would."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for one in statuses:
            look = lambda one=one: Activity(one.doing, one.values, wait=one.wait, reason=one.reason)  # noqa: E731
            tasks.create_task(report_status(bus, source=one.source, role=one.role, look=look, stop=stop))
        try:
            yield
        finally:
            stop.set()


async def answer(bus: Bus, *, shards: tuple[int, ...] = (0, 1)) -> None:
    """Announce the run and answer as its dispatcher and these shards."""

    async def groups(request: StepGroupsRequest) -> list[Message]:
        return [StepGroups(step=0, groups=(), incarnation="", trained_through=20, trains_from=1, stage="rl")]

    await bus.put("run", RunRecord(name="test", config_json=CONFIG.model_dump_json()))
    await bus.serve(bus.subject("rpc", "step_groups"), StepGroupsRequest, groups)
    for shard in shards:

        async def stored(request: StoredRequest, shard: int = shard) -> list[Message]:
            return [StoredGroups(shard=shard, after=request.after, lease_ids=(), total=3)]

        await bus.serve(bus.subject("rpc", "stored", shard), StoredRequest, stored)
