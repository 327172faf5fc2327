"""The actor processes of a run."""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import structlog

from actors.settings.actors import ActorsConfig
from actors.settings.engines import refuse_stray_node
from bus.connection.bus import Bus
from bus.errors import EngineNodeLostError, leaves
from bus.process.process_tuning import no_collections
from bus.waiting import set_within
from launch.model_files.hub_model import fetched_before, is_hub_name
from launch.process.record_trust import with_own_engine
from launch.process.run_connection import connected, joined, seen_records
from launch.process.runtime import SUPERVISOR
from launch.services.gateway_access import gateway_token, refuse_open_gateway
from launch.services.hidden_files import hidden_files
from launch.settings.numerics_checks import engine_of
from launch.settings.policies import shares_servers
from launch.settings.run_config import RunConfig, policy_config
from storage.account.records import ACTORS
from storage.metrics.spans import traced

if TYPE_CHECKING:
    from actors.other_policies.further_policy import FurtherSettings


log = structlog.get_logger()


async def serve_actors(where: RunConfig, overrides: dict[str, Any], stop: asyncio.Event) -> None:
    async with connected(where, "actors", stop) as bus:
        config = await joined(bus, where, overrides, stop)
        if config is None:
            return
        config = with_own_engine(bus, config, overrides)
        refuse_stray_node(config.actors.engine.servers)
        if config.actors.engine.servers.nodes > 1:
            await _serve_on_nodes(bus, config, overrides, stop)
        else:
            await _serve(bus, config, overrides, stop)


async def _serve_on_nodes(
    bus: Bus, config: RunConfig, overrides: dict[str, Any], stop: asyncio.Event
) -> None:
    """Run a node of an engine of several. Node 0 begins anew, as another process would, when one is lost."""
    from actors.engine_node import run_engine_node
    from actors.engines.fleet.member import RestartLimit

    if config.actors.engine.servers.node_rank:
        await run_engine_node(bus, config.actors, config.directory / config.run / "logs", stop)
        return
    failures, is_over = RestartLimit(config.actors.fleet), False
    while not (is_over or stop.is_set()):
        is_over = True
        try:
            await _serve(bus, config, overrides, stop)
        except* EngineNodeLostError as lost:
            pause_s = failures.pause_after_failure_s(time.monotonic())
            if pause_s is None:
                raise
            log.error("engine_begins_anew", reason=str(next(leaves(lost))), pause_s=pause_s)
            is_over = await set_within(stop, pause_s)


async def _serve(bus: Bus, config: RunConfig, overrides: dict[str, Any], stop: asyncio.Event) -> None:
    with no_collections():
        from actors.environments.build import built_environment
        from actors.rewards.group_filters import load_filter

    refuse_open_gateway(config)
    hidden = hidden_files(config)
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(traced(config.metrics, run=config.run, role="actor"))
        building = built_environment(config.actors, stop, hidden, token=gateway_token(config))
        environment = await opened.enter_async_context(building)
        load_filter(config.actors.group_filter, config.actors.group_limits)  # a wrong name shows at once
        bus.state.wait_for("its libraries to be loaded")
        log.info("actors_starting", run=config.run)
        with no_collections():
            from actors.service import ActorSettings, run_actors

        further = await _further_policies(bus, config, overrides, stop, opened)
        settings = ActorSettings(
            actors=with_model_directory(config),
            sampling=config.sampling, rollout_engine=engine_of(config),
            shards=config.replay.shards,
            logs=config.directory / config.run / "logs",
            account=config.directory / config.run / ACTORS,
            colocation=config.colocation,
            further=further,
            max_staleness=config.admission.max_staleness,
            exact=config.model.numerics == "exact",
            calls_rewards=SUPERVISOR not in os.environ,
        )  # fmt: skip
        await run_actors(bus, settings, environment, stop)


def with_model_directory(config: RunConfig) -> ActorsConfig:
    """Return the actors' settings with the directory of the run's model on this host, if there is one."""
    actors, path = config.actors, config.model.path
    if actors.weights.model is not None or path is None:
        return actors
    model = path if path.is_dir() else fetched_before(path) if is_hub_name(path) else None
    return actors.model_copy(update={"weights": actors.weights.model_copy(update={"model": model})})


async def _further_policies(
    bus: Bus, config: RunConfig, overrides: dict[str, Any], stop: asyncio.Event, opened: AsyncExitStack
) -> "dict[str, FurtherSettings]":
    """Return what an actor needs to know of each further policy, with a connection as long as `opened`."""
    from actors.other_policies.further_policy import FurtherSettings
    from actors.policy.cut_off_sampling import told_by

    found = {}
    for name, policy in config.policies.items():
        own = with_own_engine(bus, policy_config(config, name), overrides)
        seen = seen_records(own, "actors")
        connecting = Bus.connect(own.bus, own.run, name="actors", stop=stop, seen=seen)
        connection = await opened.enter_async_context(connecting)
        found[name] = FurtherSettings(
            connection, told_by(engine_of(own), config.sampling), policy.agents,
            max_staleness=own.admission.max_staleness,
            exact=own.model.numerics == "exact",
            shares_servers=shares_servers(config, name, own.actors.engine),
            account=own.directory / own.run / ACTORS,
        )  # fmt: skip
    return found
