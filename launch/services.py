"""The long-running commands, each one process: its part of the configuration, and its run on the bus."""

import asyncio
import json
from pathlib import Path
from typing import Any

import structlog

from bus.connection import Bus
from bus.errors import BusError, ConfigError
from bus.messages import RunRecord
from bus.server import NatsServer
from launch.config import RunConfig, resolve
from launch.runtime import locked
from learner.config import WorldConfig
from storage.files import make_directory, one_at_a_time
from storage.generators import generate_task
from storage.run import RunDirectory

log = structlog.get_logger()
PORTS = range(1 << 16)


async def serve_bus(host: str, port: int, directory: Path, stop: asyncio.Event) -> None:
    """A nats-server until `stop`."""
    if port not in PORTS:
        raise ConfigError(
            f"--port {port} is no port: choose one from 1 to {PORTS[-1]}, or 0 for any that is free"
        )
    make_directory(directory)
    with (directory / "lock").open("a") as lock:
        if not locked(lock):
            raise ConfigError(f"another `launch bus` keeps its streams in {directory}: give --directory")
        async with NatsServer(directory, host=host, port=port) as server:
            log.info("bus_ready", url=server.url)
            await _until_ended(server, stop)


async def _until_ended(server: NatsServer, stop: asyncio.Event) -> None:
    ended = asyncio.create_task(server.wait())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not stop.is_set():
        raise BusError(
            f"nats-server ended by itself with status {ended.result()}: see {server.directory}/nats.log"
        )
    ended.cancel()


async def serve_storage(config: RunConfig, stop: asyncio.Event) -> None:
    """The run's dispatcher and replay shards until `stop`."""
    from storage.service import StorageSettings, run_storage

    directory = RunDirectory(config.directory, config.run)
    directory.write_provenance()
    directory.write_json(directory.config, json.loads(config.model_dump_json()))
    settings = StorageSettings(
        data=config.data,
        admission=config.admission,
        replay=config.replay,
        seed=config.seed,
        max_new_tokens=config.sampling.max_new_tokens,
        run=directory,
        config_json=config.model_dump_json(),
    )
    async with Bus.connect(config.bus, config.run, name="storage") as bus:
        log.info("storage_ready", run=config.run, bus=config.bus.url)
        await run_storage(bus, settings, stop)


async def serve_shards(
    where: RunConfig, overrides: dict[str, Any], numbers: tuple[int, ...], stop: asyncio.Event
) -> None:
    """Some of the run's replay shards until `stop`."""
    from storage.shards_service import ShardsSettings, run_shards

    async with Bus.connect(where.bus, where.run, name="shards") as bus:
        config = await joined(bus, where, overrides, stop)
        if config is not None:
            directory = RunDirectory(config.directory, config.run)
            await run_shards(bus, ShardsSettings(numbers, config.replay, directory), stop)


async def serve_learner(
    where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event, *, is_rank: bool
) -> WorldConfig | None:
    """The run's learner, or one rank of it, until it is done or `stop`.

    Where the run wants several ranks and this is none of them, it returns at once what they are to be.
    """
    async with Bus.connect(where.bus, where.run, name="learner") as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return None
        world = config.learner.world
        if world.processes * world.nodes > 1 and not is_rank:
            return world
        directory = RunDirectory(config.directory, config.run)
        log.info("learner_starting", run=config.run)
        await _train(bus, config, directory, stop)
        return None


async def _train(bus: Bus, config: RunConfig, directory: RunDirectory, stop: asyncio.Event) -> None:
    from learner.cpu import adapt_megatron_to_cpu

    adapt_megatron_to_cpu()
    from learner.service import run
    from learner.settings import LearnerSettings

    demonstrations = config.warmup.demonstrations
    if config.warmup.steps and demonstrations is None and config.data.task:
        with one_at_a_time(directory.data):
            demonstrations = generate_task(config.data.task, directory.data, seed=config.seed).demonstrations
    settings = LearnerSettings(
        model=config.model,
        warmup=config.warmup,
        learner=config.learner,
        evaluation=config.evaluation,
        temperature=config.sampling.temperature,
        samples_per_prompt=config.admission.samples_per_prompt,
        seed=config.seed,
        model_directory=config.model.path or directory.path / "model",
        checkpoints=directory.checkpoints,
        progress=directory.path / "progress.json",
        lineage=directory.path / "lineage.jsonl",
        export=directory.export,
    )
    progress = await run(bus, settings, demonstrations, stop)
    if progress is not None:
        log.info("learner_ends", stage=progress.stage, step=progress.step)


async def serve_actors(where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event) -> None:
    """One actor process until `stop` or the end of the run."""
    from actors.environments.single_turn import SingleTurn
    from actors.filters import load_filter

    async with Bus.connect(where.bus, where.run, name="actors") as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return
        SingleTurn.from_config(config.actors.environment)  # before torch loads: a wrong name shows at once
        load_filter(config.actors.group_filter)
        log.info("actors_starting", run=config.run)
        from actors.service import ActorSettings, run_actors

        settings = ActorSettings(actors=config.actors, sampling=config.sampling, shards=config.replay.shards)
        await run_actors(bus, settings, stop)


async def joined(
    bus: Bus, where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event
) -> RunConfig | None:
    """The run's configuration from the bus, with this process's own settings over it; None if `stop` came."""
    waiting = asyncio.create_task(
        bus.wait_for(
            "run",
            RunRecord,
            timeout_s=where.bus.join_timeout_s,
            hint=f"is `launch storage --run {where.run}` running on this bus?",
        )
    )
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not waiting.done():
        waiting.cancel()
        return None
    own = {"run": where.run, "directory": where.directory, "bus": where.bus.model_dump()}
    return resolve(json.loads((await waiting).config_json), overrides, own)
