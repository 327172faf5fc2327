"""What a command asks of a live run: a profile, other prompts, engines that join or leave."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nats.errors import NoRespondersError

from actors.engines.fleet.engine_admin import subject_of
from bus.codec import Json, Message
from bus.connection.bus import Bus
from bus.errors import BusAwayError, BusError, ConfigError
from bus.messages import Status
from bus.requests import DataAccepted, Done, EngineChange, NewData, Profiled, ProfileRequest
from bus.streams.blob_store import delete_blob, put_blob
from bus.streams.publish import Publisher
from bus.waiting import told_if_slow
from launch.process.run_connection import joined
from launch.run_view.monitor import RunMonitor, RunSettings
from launch.run_view.status_texts import engines_of
from launch.settings.run_config import RunConfig
from storage.prompt_files.dataset import encoded_prompts, load_prompts

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Asked:
    """Who is asked, and what may be said of the answer."""

    who: str
    refused: str
    """What a refusal means, as the beginning of a sentence."""
    unknown: str
    """What is not known where no answer came, and where to look, as a sentence."""


async def answer_of(
    bus: Bus, subject: str, request: Message, expected: type[R], asked: Asked, *, timeout_s: float
) -> R:
    """Return the answer. Raises `ConfigError` with the reason of a refusal, and `BusAwayError` where none
    came in time: the process has not heard the request, or may do it all the same."""
    run = bus.topology.run
    try:
        with told_if_slow("waiting_for_answer", who=asked.who, run=run, longest_s=timeout_s):
            return await bus.request(subject, request, expected, timeout_s=timeout_s)
    except BusError as error:
        if error.refusal:
            raise ConfigError(f"{asked.refused}: {error.refusal}") from error
        not_sent = isinstance(error, BusAwayError) or isinstance(error.__cause__, NoRespondersError)
        rest = "nothing was asked of it, try again" if not_sent else asked.unknown
        raise BusAwayError(f"{asked.who} of run {run!r}: {error}; {rest}") from error


async def take_profile(where: RunConfig, steps: int, timeout_s: float, stop: asyncio.Event) -> Profiled:
    """Return where the profile of the next steps lies, on the learner's host, and what it says. Raises
    `BusAwayError` where no learner answers in time, and `ConfigError` with the reason of one that refuses."""
    async with Bus.connect(where.bus, where.run, name="profile") as bus:
        request, subject = ProfileRequest(steps=steps), bus.subject("rpc", "profile")
        asked = Asked(
            "the learner",
            f"run {where.run!r} has no profile of {steps} steps",
            "whether it takes the profile is not known: one that it took lies in profiles/ of the run, and "
            "`launch status` says what it does",
        )
        return await answer_of(bus, subject, request, Profiled, asked, timeout_s=timeout_s)


RUN_TIMEOUT_S = 5.0
"""Longest wait for a run, since only one that goes on takes other prompts."""
PROMPTS_TIMEOUT_S = 300.0
"""Longest wait for the answer, before which every prompt is rendered and tokenised."""


async def add_data(where: RunConfig, path: Path, keep_old: bool, stop: asyncio.Event) -> DataAccepted | None:
    """Send the prompts in `path` to the run's storage; None if `stop` came before the run was found. Raises
    `BusAwayError` when there is no such run, or its storage does not answer, and `ConfigError` for bad rows
    and prompts that do not fit the model."""
    limit_s = min(where.bus.join_timeout_s, RUN_TIMEOUT_S)
    where = where.model_copy(update={"bus": where.bus.model_copy(update={"join_timeout_s": limit_s})})
    async with Bus.connect(where.bus, where.run, name="data") as bus:
        config = await joined(bus, where, {}, stop)
        if config is None:
            return None
        prompts = await asyncio.to_thread(load_prompts, path, config.data.keys)
        blob = await put_blob(bus, Publisher(bus), encoded_prompts(prompts, str(path)), "prompts")
        request = NewData(prompts=blob, keep_old=keep_old, source=str(path))
        asked = Asked(
            "storage",
            f"{path}: run {where.run!r} goes on with its prompts",
            f"whether it took those of {path} is not known: its log says `data_set_takes_over` if it did",
        )
        subject = bus.subject("rpc", "data")
        try:
            return await answer_of(bus, subject, request, DataAccepted, asked, timeout_s=PROMPTS_TIMEOUT_S)
        finally:
            await delete_blob(bus, blob)


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
    """Add a server to an actor, or remove an engine from it; return the actor's name. Without a name, a
    server joins the actor with the fewest engines, and leaves the one that has it. Raises `ConfigError` with
    the actor's reason when it does not, and `BusAwayError` when it does not answer."""
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
