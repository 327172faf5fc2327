"""`launch engines`: lists the engines of a run's actors, and adds or removes servers."""

import asyncio
from collections.abc import Mapping, Sequence

from actors.engines.fleet.engine_admin import subject_of
from bus.codec import Json
from bus.connection.bus import Bus
from bus.errors import ConfigError
from bus.messages import Status
from bus.requests import Done, EngineChange
from launch.operations.process_answer import Asked, answer_of
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.status_texts import engines_of
from launch.settings.run_config import RunConfig

LISTEN_S = 2.0
"""Time to listen for actors, each of which sends its status twice a second."""
ENGINE_TIMEOUT_S = 180.0
"""Time to wait for an engine that leaves, which hands out its tokens and closes first."""

Engines = Mapping[str, Mapping[str, Json]]
"""Engines of each actor by name, each with its state."""


async def list_engines(where: RunConfig, stop: asyncio.Event) -> Engines:
    """Return the engines of all running actors. Raises `ConfigError` when there are none."""
    async with Bus.connect(where.bus, where.run, name="engines") as bus:
        return await _engines(bus, where)


async def change_engine(
    where: RunConfig, change: EngineChange, actor: str | None, stop: asyncio.Event
) -> str:
    """Add a server to an actor, or remove an engine from it; return the actor's name.

    Without a name, a server joins the actor with the fewest engines, and leaves the one that has it. Raises
    `ConfigError` with the actor's reason when it does not, and `BusAwayError` when it does not answer."""
    async with Bus.connect(where.bus, where.run, name="engines") as bus:
        found = await _engines(bus, where)
        chosen = _chosen(found, change, actor)
        asked = Asked(chosen, chosen, "whether it did so is not known: `launch engines list` shows it")
        await answer_of(bus, subject_of(bus, chosen), change, Done, asked, timeout_s=ENGINE_TIMEOUT_S)
        return chosen


async def _engines(bus: Bus, where: RunConfig) -> Engines:
    monitor = RunMonitor(RunSettings.of_run(where))
    listening = await bus.listen(bus.subject("status", "actor"), Status, monitor.on_status)
    await asyncio.sleep(LISTEN_S)
    await listening.unsubscribe()
    return engines_heard([process.status for process in monitor.actors()], where.run)


def engines_heard(actors: Sequence[Status], run: str) -> Engines:
    """Return the engines that these actors of a run tell of. Raises `ConfigError` where they tell of none."""
    found = {one.source: engines_of(one.values) for one in actors if "engines" in one.values}
    if not found and actors:
        said = "; ".join(sorted(f"{actor.source}: {actor.text}" for actor in actors))
        raise ConfigError(f"no actor that was heard of run {run!r} has an engine yet: {said}")
    if not found:
        raise ConfigError(
            f"no actor of run {run!r} was heard within {LISTEN_S:g} s: if none runs on this bus, start "
            "one with `launch actors`"
        )
    return found


def _chosen(found: Engines, change: EngineChange, actor: str | None) -> str:
    name = change.engine.rstrip("/")
    if actor is not None:
        if actor not in found:
            raise ConfigError(f"no actor {actor!r}: there are {', '.join(sorted(found))}")
        return actor
    holders = [actor for actor, engines in found.items() if name in engines]
    if change.action == "join":
        if holders:
            raise ConfigError(f"{name} is an engine of {holders[0]} already: each would load its own weights")
        return min(found, key=lambda actor: (len(found[actor]), actor))
    if len(holders) != 1:
        has = "none has it" if not holders else f"{', '.join(sorted(holders))} have it: name one with --actor"
        engines = sorted({engine for engines in found.values() for engine in engines})
        raise ConfigError(f"which actor is to let {name} go? {has}. Engines: {', '.join(engines)}")
    return holders[0]
