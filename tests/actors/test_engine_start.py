"""Every run that an actor works for hears that its engines start."""

import asyncio

import pytest

from actors.engine_start import started
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.messages import Status
from bus.server.nats_server import NatsServer
from tests.storage.serving import until

pytestmark = pytest.mark.nats


async def test_the_runs_of_further_policies_hear_that_engines_start(server: NatsServer):
    heard: dict[str, str] = {}
    begun, stop = asyncio.Event(), asyncio.Event()

    class Slow:
        async def start(self) -> None:
            await begun.wait()

    config = BusConfig(url=server.url)
    async with (
        Bus.connect(config, "main", name="actors") as main,
        Bus.connect(config, "further", name="actors") as further,
    ):
        for bus in (main, further):
            run = bus.topology.run

            def hear(status: Status, run: str = run) -> None:
                heard[run] = status.wait

            await bus.listen(bus.subject("status", "actor"), Status, hear)
        starting = asyncio.create_task(started([main, further], [Slow()], stop))
        await until(lambda: heard == {"main": "engine", "further": "engine"})
        begun.set()
        assert await starting
        begun.clear()
        stop.set()
        assert not await started([main, further], [Slow()], stop)
