"""A fleet of embedded engines."""

import asyncio
from contextlib import asynccontextmanager

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.fleet import Fleet
from actors.settings.engines import EmbeddedEngineConfig
from actors.settings.fleet import FleetConfig
from tests.actors.engines.embedded.halted_generation import halted_at
from tests.actors.tiny import request, tiny_model

PROMPT = [3, 4, 5, 6, 7]
LONG = 120
QUICK = FleetConfig(engines=2, drain_timeout_s=5, close_timeout_s=20, backoff_s=0.05, health_period_s=1000)


@asynccontextmanager
async def fleet_of(*names, state):
    """A fleet of embedded engines, and all that were built for it; their own weights are nobody's."""
    built: dict[str, list[EmbeddedEngine]] = {name: [] for name in names}

    def building(name):
        async def build():
            engine = EmbeddedEngine(tiny_model("qwen3", seed=9), EmbeddedEngineConfig(seed=0))
            built[name].append(engine)
            return engine

        return build

    fleet = Fleet({name: building(name) for name in names}, QUICK)
    await fleet.start()
    try:
        await fleet.load_weights(state, 0)
        yield fleet, built
    finally:
        await fleet.close()
    assert not any(engine._thread.is_alive() for engines in built.values() for engine in engines)


async def begun(fleet, built, name, tokens, **sampling):
    """A greedy generation that has stopped after `tokens` tokens, and the place that works on it."""
    halts = {place: halted_at(engines[-1], tokens) for place, engines in built.items()}
    task = asyncio.create_task(fleet.generate(request(name, PROMPT, new=LONG, temperature=0.0, **sampling)))
    waiting = {asyncio.create_task(halt.wait()): place for place, halt in halts.items()}
    done, pending = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    [there] = done
    for other in pending:
        other.cancel()
        vars(built[waiting[other]][-1]._decoder).pop("step")  # it need not stop any more
    return task, waiting[there]


async def uninterrupted(fleet):
    return await fleet.generate(request("whole", PROMPT, new=LONG, temperature=0.0))
