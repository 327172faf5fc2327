"""The processes of a run: each gets its part of the configuration and works on the bus."""

import asyncio
import json
import platform
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from bus.config import without_credentials
from bus.connection import Bus
from bus.connection.process_state import ProcessState
from bus.errors import BusError, ConfigError
from bus.messages import RunRecord
from bus.policy_names import DEFAULT_POLICY
from bus.process.process_tuning import no_collections
from bus.security.credentials import Credentials, load_credentials
from bus.server.nats_server import NatsServer, is_loopback
from bus.server.secure_directory import SecureDirectory
from bus.waiting import cancelled, ended_before
from launch.config import MonitoringConfig, ProcessConfig, RunConfig, of_policy, resolve
from launch.evaluation_checks import refuse_nobody_rolls_out
from launch.numerics_checks import engine_of
from launch.policies import policy_bus, shares_servers
from launch.process.bus_keys import follow_directory
from launch.process.bus_room import has_room, until_full
from launch.process.gateway_access import gateway_token, refuse_open_gateway
from launch.process.health_server import monitored
from launch.process.hidden_files import hidden_files
from launch.process.hub_revision import pin
from launch.process.model_directory import model_directory, model_here, refuse_full_context
from launch.process.ranks import serves_probes
from launch.process.record_trust import restrict_to_own, with_own_engine
from launch.process.settings_revision import follow_settings, revision_of
from launch.process.vision_checks import counts_images
from launch.process.write_check import until_it_cannot_store
from learner.config.parallel import WorldConfig
from storage.account.records import ACTORS
from storage.built_in_tasks.generators import generate_task
from storage.disk.atomic_files import make_directory, one_at_a_time, try_lock, write_file
from storage.disk.run_directory import RunDirectory

if TYPE_CHECKING:
    from actors.other_policies.further_policy import FurtherSettings
    from learner.config.process_settings import LearnerSettings

log = structlog.get_logger()
PORTS = range(1 << 16)


async def serve_bus(
    host: str, port: int, directory: Path, stop: asyncio.Event, *, insecure: bool = False,
    secure: Path | None = None, runs: tuple[str, ...] = (), monitoring: MonitoringConfig | None = None,
) -> None:  # fmt: skip
    """Run a nats-server until `stop`; it lets in only who has credentials from the directory `secure`.

    Raises `ConfigError` for a host beyond loopback that everybody could use, unless `insecure` allows it.
    """
    if not (is_loopback(host) or insecure or secure is not None):
        raise ConfigError(
            f"--host {host} would let everybody on the network run programs on the run's hosts, since no "
            "credentials are asked for: give --secure DIR, listen at 127.0.0.1, "
            "or give --insecure on a network of your own"
        )
    if port not in PORTS:
        raise ConfigError(
            f"--port {port} is no port: choose one from 1 to {PORTS[-1]}, or 0 for any that is free"
        )
    state = ProcessState("bus")
    state.wait_for("nats-server to listen")
    make_directory(directory)
    with (directory / "lock").open("a") as lock:
        if not try_lock(lock):
            raise ConfigError(f"another `launch bus` keeps its streams in {directory}: give --directory")
        keys = SecureDirectory(secure) if secure is not None else None
        monitoring = monitoring or MonitoringConfig()
        server = NatsServer(directory, host=host, port=port, secure=keys, http_port=monitoring.nats_port)
        if keys is not None:
            reached_at = platform.node() if host in ("0.0.0.0", "::") else host
            keys.make(runs, f"nats://{reached_at}:{server.port}")
        async with monitored(monitoring, state), server:
            log.info("bus_ready", url=server.url, runs=keys.runs if keys is not None else "all")
            if keys is None:
                await _keep_alive(server, state, stop, None)
                return
            following = asyncio.create_task(follow_directory(server, keys, stop), name="follow keys")
            try:
                await _keep_alive(server, state, stop, load_credentials(keys.probe))
            finally:
                await cancelled(following)


async def _keep_alive(
    server: NatsServer, state: ProcessState, stop: asyncio.Event, probe: Credentials | None
) -> None:
    """Restart a server that stores nothing any more, until `stop`."""
    restarts = 0
    while True:
        state.waits_for, state.doing = "", f"nats-server listens at {server.url}"
        state.values = {"restarts": restarts}
        if await _ended_or_stopped(server, stop, probe):
            return
        state.wait_for("nats-server to start again, since it could not store: is the disk full?")
        if not await has_room(server.directory, state, stop):
            return
        restarts += 1
        await server.stop()
        await server.start()


async def _ended_or_stopped(server: NatsServer, stop: asyncio.Event, probe: Credentials | None) -> bool:
    """Wait for `stop`; return False when the server has to be restarted before."""
    ended = asyncio.create_task(server.wait())
    stopping = asyncio.create_task(stop.wait())
    refusing = asyncio.create_task(until_it_cannot_store(server.url, probe))
    # a full disk may break some streams and not that of the probe
    full = asyncio.create_task(until_full(server.directory))
    tasks = {ended, stopping, refusing, full}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await cancelled(*tasks)
    if stop.is_set():
        return True
    if not ended.cancelled():
        raise BusError(
            f"nats-server ended by itself with status {ended.result()}: see {server.directory}/nats.log"
        )
    reason = (refusing if full.cancelled() else full).result()
    log.error("bus_cannot_store", reason=reason, remedy="is the disk full? nats-server starts again")
    return False


async def serve_storage(config: RunConfig, stop: asyncio.Event, *, summary: bool = True) -> None:
    """Run the run's dispatcher and replay shards until `stop`, and those of each further policy's run.

    `summary` makes curves and a summary too."""
    async with asyncio.TaskGroup() as tasks:
        for name in config.policies:
            tasks.create_task(_serve_run(policy_config(config, name), stop, summary=summary))
        tasks.create_task(_serve_run(config, stop, summary=summary))


async def _serve_run(config: RunConfig, stop: asyncio.Event, *, summary: bool) -> None:
    from launch.watch.conclusion import concluding
    from storage.metrics.sinks import metric_sinks
    from storage.service import StorageSettings, run_storage

    refuse_full_context(config)
    refuse_nobody_rolls_out(config)
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
        model=model_here(config.model.path, directory),
        evaluation_sets=config.evaluation.sets,
        shares_prefixes=config.learner.batch.share_prefixes,
        counts_images=counts_images(config),
        measures=config.trains == DEFAULT_POLICY,
    )
    async with (
        metric_sinks(config.metrics, directory, settings.config_json) as sinks,
        connected(config, "storage", stop) as bus,
        concluding(bus, config, directory) if summary else nullcontext(),
    ):
        bus.state.revision = revision_of(settings.config_json)
        await run_storage(bus, replace(settings, sinks=tuple(sinks)), stop)


async def serve_shards(
    where: RunConfig, overrides: dict[str, Any], numbers: tuple[int, ...], stop: asyncio.Event
) -> None:
    """Run some of the run's replay shards until `stop`."""
    from storage.shard.service import ShardsSettings, run_shards

    async with connected(where, "shards", stop) as bus:
        config = await joined(bus, where, overrides, stop)
        if config is not None:
            directory = RunDirectory(config.directory, config.run)
            await run_shards(bus, ShardsSettings(numbers, config.replay, directory), stop)


def policy_config(config: RunConfig, name: str) -> RunConfig:
    """Return the settings of a further policy's run, with the way to reach it on the bus."""
    found = of_policy(config, name)
    return found.model_copy(update={"bus": policy_bus(config.bus, config.run, name)})


async def serve_policy_learner(
    where: RunConfig, overrides: dict[str, Any], policy: str, stop: asyncio.Event, *, is_rank: bool
) -> WorldConfig | None:
    """Do what `serve_learner` does for a further policy of the run.

    Raises `ConfigError` for a policy that the run does not train."""
    async with connected(where, "learner", stop) as bus:
        config = await joined(bus, where, {}, stop)
    if config is None:
        return None
    own = policy_config(config, policy)
    place = {"run": own.run, "bus": own.bus, "monitoring": where.monitoring, "allow": where.allow}
    return await serve_learner(where.model_copy(update=place), overrides, stop, is_rank=is_rank)


async def serve_learner(
    where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event, *, is_rank: bool
) -> WorldConfig | None:
    """Run the run's learner, or one rank of it, until it is done or `stop`.

    Where the run wants several ranks and this is none of them, it returns at once what they are to be.
    """
    async with connected(where, "learner", stop) as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return None
        bus.state.wait_for("its model and optimizer to be built")
        world = config.learner.world
        if world.processes * world.nodes > 1 and not is_rank:
            return world
        directory = RunDirectory(config.directory, config.run)
        log.info("learner_starting", run=config.run)
        await _train(bus, config, directory, stop)
        return None


async def _train(bus: Bus, config: RunConfig, directory: RunDirectory, stop: asyncio.Event) -> None:
    with no_collections():
        from learner.run.service import run

    def record() -> None:  # not before: a learner that is refused has trained nothing
        write_file(directory.learner_config, config.model_dump_json(indent=2, exclude={"bus"}).encode())

    settings, demonstrations = await asyncio.to_thread(learner_settings, config, directory)
    progress = await run(bus, settings, demonstrations, stop, begin=record)
    if progress is not None:
        log.info("learner_ends", stage=progress.stage, step=progress.step)


def learner_settings(config: RunConfig, directory: RunDirectory) -> tuple["LearnerSettings", Path | None]:
    """Return the learner's settings, and where its demonstrations are; generated ones are written.

    A model of the hub is fetched as it was when the run began. Raises `ConfigError` when there is none."""
    from learner.config.process_settings import EngineContext, LearnerSettings
    from learner.initial.micro_batch import fitted

    demonstrations, path = config.warmup.demonstrations, config.model.path
    if config.warmup.steps and demonstrations is None and config.data.task:
        with one_at_a_time(directory.data):
            demonstrations = generate_task(config.data.task, directory.data, seed=config.seed).demonstrations
    settings = LearnerSettings(
        model=config.model,
        warmup=config.warmup,
        learner=config.learner,
        evaluation=config.evaluation,
        samples_per_prompt=config.admission.samples_per_prompt,
        seed=config.seed,
        model_directory=directory.path / "model" if path is None else model_directory(pin(path, directory)),
        checkpoints=directory.checkpoints,
        progress=directory.path / "progress.json",
        lineage=directory.path / "lineage.jsonl",
        export=directory.export,
        evaluated_on=config.actors.evaluates_on,
        colocation=config.colocation,
        engine_context=EngineContext(config.actors.engine.context, config.actors.engine.left_free),
    )
    return fitted(settings), demonstrations


async def serve_shadow(
    where: RunConfig, overrides: dict[str, Any], name: str, from_checkpoint: Path | None, stop: asyncio.Event
) -> None:
    """Run a shadow of the run's learner until that is done or `stop`."""
    _refuse_no_checkpoint(from_checkpoint)
    kept = RunDirectory(where.directory, where.run).shadow(name)
    async with connected(where, "shadow", stop, name=f"shadow-{name}") as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return
        with no_collections():
            from learner.history.shadow import ShadowSettings, run_shadow

        directory = RunDirectory(config.directory, config.run)
        settings, demonstrations = await asyncio.to_thread(learner_settings, config, directory)
        own = replace(
            settings,
            checkpoints=kept / "checkpoints",
            progress=kept / "progress.json",
            lineage=kept / "lineage.jsonl",
            export=kept / "export",
        )
        shadow = ShadowSettings(name, own, kept / "metrics.jsonl", from_checkpoint)
        log.info("shadow_starting", run=config.run, shadow=name)
        progress = await run_shadow(bus, shadow, demonstrations, stop)
        log.info("shadow_ends", step=progress.step, steps_retired=progress.steps_retired)


def _refuse_no_checkpoint(directory: Path | None) -> None:
    if directory is not None and not (directory / "manifest.json").is_file():
        raise ConfigError(f"--from-checkpoint {directory} is not a checkpoint: it has no manifest.json")


async def serve_actors(where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event) -> None:
    """Run an actor process until `stop` or the end of the run."""
    with no_collections():
        from actors.environments.build import built_environment
        from actors.programs.hidden import hide
        from actors.rewards.group_filters import load_filter

    async with connected(where, "actors", stop) as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return
        config = with_own_engine(bus, config, overrides)
        refuse_open_gateway(config)
        hide(hidden_files(config))
        async with built_environment(config.actors, stop) as environment, AsyncExitStack() as opened:
            load_filter(config.actors.group_filter, config.actors.group_limits)  # a wrong name shows at once
            bus.state.wait_for("its libraries to be loaded")
            log.info("actors_starting", run=config.run)
            with no_collections():
                from actors.service import ActorSettings, run_actors

            further = await _further_policies(bus, config, overrides, stop, opened)
            settings = ActorSettings(
                actors=config.actors, sampling=config.sampling, rollout_engine=engine_of(config),
                shards=config.replay.shards,
                logs=config.directory / config.run / "logs",
                account=config.directory / config.run / ACTORS,
                colocation=config.colocation,
                gateway_token=gateway_token(config),
                further=further,
                max_staleness=config.admission.max_staleness,
                exact=config.model.numerics == "exact",
            )  # fmt: skip
            await run_actors(bus, settings, environment, stop)


async def _further_policies(
    bus: Bus, config: RunConfig, overrides: dict[str, Any], stop: asyncio.Event, opened: AsyncExitStack
) -> "dict[str, FurtherSettings]":
    """Return what an actor needs to know of each further policy, with a connection as long as `opened`."""
    from actors.other_policies.further_policy import FurtherSettings
    from actors.policy.sampling_masks import told_by

    found = {}
    for name, policy in config.policies.items():
        own = with_own_engine(bus, policy_config(config, name), overrides)
        connecting = Bus.connect(own.bus, own.run, name="actors", stop=stop)
        connection = await opened.enter_async_context(connecting)
        found[name] = FurtherSettings(
            connection, told_by(engine_of(own), config.sampling), policy.agents,
            max_staleness=own.admission.max_staleness,
            exact=own.model.numerics == "exact",
            shares_servers=shares_servers(config, name, own.actors.engine),
            account=own.directory / own.run / ACTORS,
        )  # fmt: skip
    return found


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
        Bus.connect(where.bus, where.run, name=name or role, stop=stop, state=state) as bus,
    ):
        state.wait_for(_FIRST_WAIT.get(role, "the run's storage: is `launch storage` running?"))
        try:
            yield bus
        finally:
            if state.following is not None:
                await cancelled(state.following)


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
