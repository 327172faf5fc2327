"""What screens hear while an actor's engines start."""

import asyncio

import pytest

from actors.engine_start import started
from actors.engines.fleet.fleet import Fleet
from actors.settings.fleet import FleetConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.connection import Bus
from bus.messages import Status


class SlowEngine(ScriptedEngine):
    """An engine that says what it does until it may serve."""

    starting = "loading the model"

    def __init__(self) -> None:
        super().__init__(lambda prompt: prompt)
        self.may_serve = asyncio.Event()

    async def start(self) -> None:
        await self.may_serve.wait()
        self.starting = ""


@pytest.mark.nats
async def test_the_status_of_an_actor_says_what_its_engine_does_before_it_serves(bus: Bus):
    engine, heard = SlowEngine(), asyncio.Queue[Status]()

    async def build() -> SlowEngine:
        return engine

    async def until_said(doing: str) -> None:
        async with asyncio.timeout(60):
            while (await heard.get()).doing != doing:
                continue

    await bus.listen(bus.subject("status", "actor"), Status, heard.put_nowait)
    fleet = Fleet({"engine-0": build}, FleetConfig())
    starting = asyncio.create_task(started([bus], [fleet], asyncio.Event()))
    await until_said("starting its engine: loading the model")
    engine.starting = "capturing CUDA graphs"
    await until_said("starting its engine: capturing CUDA graphs")
    assert fleet.engines["engine-0"]["starting"] == "capturing CUDA graphs"
    engine.may_serve.set()
    assert await starting
    assert fleet.engines["engine-0"]["starting"] == ""
    await fleet.close()
