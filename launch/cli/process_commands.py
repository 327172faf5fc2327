"""Commands that are the long-running processes of a run which exists: its bus, and who joins it."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bus.errors import ConfigError
from bus.policy_names import policy_run
from bus.process.child_process import module_command
from launch.cli import options
from launch.cli.app import USAGE, allowed_here, app, log_as, run_and_own_settings
from launch.external_environments.environment import external_environment
from launch.process.ranks import become_rank, is_rank
from launch.process.runtime import run
from launch.settings.run_config import (
    ActorsProcess,
    LearnerProcess,
    MonitoringConfig,
    ProcessConfig,
    RunConfig,
    merge,
)
from launch.settings.short_forms import short_forms


@app.command(name="bus", usage=USAGE.format("bus"))
def bus_command(
    *,
    host: str = "127.0.0.1",
    port: int = 4222,
    directory: Path = Path("runs/bus"),
    insecure: Annotated[bool, Parameter(name="--insecure", negative=())] = False,
    secure: Path | None = None,
    runs: Annotated[list[str] | None, Parameter(name="--run", negative=())] = None,
    log: options.Logging = options.LogOptions(),
    monitoring: MonitoringConfig = MonitoringConfig(),
) -> None:
    """Run a nats-server with JetStream on this machine.

    Parameters
    ----------
    host
        Address to listen on; 0.0.0.0 accepts other hosts.
    port
        Port to listen on.
    directory
        Directory of its streams.
    insecure
        Accept everybody who reaches a host beyond loopback: for a network that is yours alone.
    secure
        Directory of credentials, made if it is missing: only who has one of its files is let in, over TLS.
    runs
        Run that gets credentials there, besides those that have them; may be given several times.
    monitoring
        Probes and metrics of this process over HTTP.
    """
    from launch.services.bus import serve_bus

    log_as(log, "bus")
    named = tuple(runs or (["default"] if secure is not None else []))
    if named and secure is None:
        raise ConfigError(f"--run {named[0]}: credentials are made for a run with --secure DIR: give both")
    serving = partial(serve_bus, host, port, directory, insecure=insecure, secure=secure, runs=named)
    run(partial(serving, monitoring=monitoring))


@app.command(usage=USAGE.format("shards"))
def shards(
    *,
    numbers: Annotated[str, options.short("--shards")],
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    log: options.Logging = options.LogOptions(),
    settings: options.ShardsSettings = ProcessConfig(),
) -> None:
    """Keep those replay shards of a run that its `launch storage` leaves out. The run is named by --run.

    Their files are under --directory of this host. You may start several such processes, on any hosts.

    Parameters
    ----------
    numbers
        Numbers of the shards, such as 2, 0-3 or 0,2-3.
    """
    from launch.services.storage import serve_shards
    from storage.settings.replay import shard_numbers

    log_as(log, "shards")
    where, own = run_and_own_settings(short_forms(bus, creds), settings)
    run(partial(serve_shards, where, own, shard_numbers(numbers)))


@app.command(usage=USAGE.format("learner"))
def learner(  # noqa: PLR0913 - each is a flag
    *,
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    nproc: options.Processes = None,
    nodes: options.Nodes = None,
    node_rank: options.NodeRank = None,
    master: options.Master = None,
    stopped_status: options.StoppedStatus = 0,
    policy: str | None = None,
    shadow: str | None = None,
    from_checkpoint: Path | None = None,
    plugins_from: options.PluginsFrom = None,
    insecure: options.Insecure = False,
    log: options.Logging = options.LogOptions(),
    settings: options.LearnerSettings = LearnerProcess(),
) -> None:
    """Train the policy of the run named by --run, whose storage must run. Its settings come from the bus.

    Parameters
    ----------
    policy
        Name of the further policy that is trained, one of the run's `policies`, instead of the run's own.
    nproc
        Number of ranks on this host, one for each GPU.
    nodes
        Number of the learner's hosts. The same command runs on each, with its own --node-rank.
    node_rank
        Number of this host, from 0.
    master
        Address of node 0 and a free port there, as host:port.
    stopped_status
        Exit status of a learner that was told to stop before its run was done, such as 75 for a job of
        Kubernetes, which counts 0 as the end.
    shadow
        Name of a shadow, which this learner becomes: it trains on the steps of the run's learner with
        settings of your own, and changes nothing in the run.
    from_checkpoint
        Directory of the checkpoint that the shadow starts from; without it the shadow starts from the initial
        model.
    insecure
        Import what the run names although everybody who reaches the bus can define a run: for a network that
        is yours alone.
    """
    log_as(log, "learner")
    world = _world(processes=nproc, nodes=nodes, node_rank=node_rank, master=master)
    short = merge(short_forms(bus, creds), allowed_here(plugins_from, insecure), world)
    where, own = run_and_own_settings(short, settings)
    if shadow is not None:
        from launch.services.learner import serve_shadow

        _refuse_beside_shadow(shadow, policy, where.run, has_world=bool(world) or is_rank())
        if stopped_status:
            raise ConfigError("--stopped-status is for a learner, not for a --shadow")
        run(partial(serve_shadow, where, own, shadow, from_checkpoint))
        return
    if from_checkpoint is not None:
        raise ConfigError("--from-checkpoint is for a --shadow: a learner goes on from its own newest one")
    if status := _train(where, own, policy) or _unfinished(where, policy, stopped_status):
        raise SystemExit(status)


def _world(**given: int | str | None) -> dict[str, Any]:
    world = {name: value for name, value in given.items() if value is not None}
    return {"learner": {"world": world}} if world else {}


def _train(where: RunConfig, own: dict[str, Any], policy: str | None) -> int:
    """Train as one process, as a rank that torchrun has started, or as the torchrun of several.

    Returns the exit status."""
    from launch.services.learner import serve_learner, serve_policy_learner

    if is_rank():
        become_rank()
    serving = (
        partial(serve_learner, where, own)
        if policy is None
        else partial(serve_policy_learner, where, own, policy)
    )
    several = run(partial(serving, is_rank=is_rank()))
    if several is None:
        return 0
    from launch.process.torchrun import run_world

    return run_world(several, where.run, module_command("launch", *sys.argv[1:])[1:])


def _unfinished(where: RunConfig, policy: str | None, stopped_status: int) -> int:
    """Return `stopped_status` if the learner has ended before its run was done, else 0.

    Of a rank it is 0, since its agent would start it again."""
    if is_rank() or not stopped_status:
        return 0
    from launch.checks.resumption import stage_of
    from storage.disk.run_directory import RunDirectory

    name = where.run if policy is None else policy_run(where.run, policy)
    return 0 if stage_of(RunDirectory(where.directory, name)) == "done" else stopped_status


def _refuse_beside_shadow(shadow: str, policy: str | None, run_name: str, *, has_world: bool) -> None:
    """Raise `ConfigError` for flags that a shadow does not have."""
    if policy is not None:
        raise ConfigError(
            f"--policy {policy} with --shadow {shadow}: the shadow of a further policy names its run, as "
            f"--run {policy_run(run_name, policy)}"
        )
    if has_world:
        raise ConfigError(f"shadow {shadow!r} is one process: it has no ranks, nodes or master")


@app.command(usage=USAGE.format("actors"))
def actors(  # noqa: PLR0913 - each is a flag
    *,
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    reward: options.RewardName = None,
    agent: Annotated[
        options.AgentCommand,
        Parameter(
            help="Command of a program that is run for each episode, and asks the policy as it would ask "
            "OpenAI's or Anthropic's servers. It posts its reward, unless --reward computes it."
        ),
    ] = None,
    environment: options.EnvironmentName = None,
    plugins_from: options.PluginsFrom = None,
    engine_python: options.EnginePython = None,
    insecure: options.Insecure = False,
    log: options.Logging = options.LogOptions(),
    settings: options.ActorsSettings = ActorsProcess(),
) -> None:
    """Roll out prompts for the run named by --run. You may start several actors, on any hosts.

    What no flag sets is as the run says; the values in brackets are those of a new run.

    Parameters
    ----------
    insecure
        Import and run what the run names although everybody who reaches the bus can define a run: for a
        network that is yours alone.
    """
    from launch.services.actors import serve_actors

    log_as(log, "actors")
    external = None if environment is None else external_environment(environment)
    if external is not None:
        external.prepare()
    short = merge(
        {} if external is None else {"actors": external.settings["actors"]},
        short_forms(bus, creds, reward=reward, agent=agent),
        allowed_here(plugins_from, insecure, engine_python),
    )
    run(partial(serve_actors, *run_and_own_settings(short, settings)))


@app.command(usage=USAGE.format("gateway"))
def gateway(  # noqa: PLR0913 - each is a flag
    *,
    bus: options.RunBusUrl = None,
    creds: options.CredsFile = None,
    host: options.GatewayHost = None,
    port: options.GatewayPort = None,
    certificate: options.Certificate = None,
    certificate_key: options.CertificateKey = None,
    reward: Annotated[
        options.RewardName,
        Parameter(
            help="Reward that is computed from the policy's last answer, instead of the one that each "
            "client posts."
        ),
    ] = None,
    show_token: options.ShowToken = False,
    plugins_from: options.PluginsFrom = None,
    engine_python: options.EnginePython = None,
    insecure: options.Insecure = False,
    log: options.Logging = options.LogOptions(),
    settings: options.ActorsSettings = ActorsProcess(),
) -> None:
    """Serve the policy of the run named by --run to clients that lead episodes themselves.

    A client takes a task with POST /tasks, asks the policy as it would ask OpenAI's or Anthropic's servers,
    and posts its reward. The gateway has engines of its own; its settings are those of `launch actors`.

    Parameters
    ----------
    host
        Address to listen at, 127.0.0.1 without it; one beyond loopback wants credentials and a certificate.
    port
        Port to listen at; without it any that is free.
    insecure
        Do what the run names although everybody who reaches the bus can define a run, and listen beyond
        loopback without credentials: for a network that is yours alone.
    """
    from launch.services.actors import serve_actors
    from launch.services.gateway_access import gateway_token

    listening = {"host": host, "port": port, "certificate": certificate, "certificate_key": certificate_key}
    allowed = allowed_here(plugins_from, insecure, engine_python)
    short = merge(_clients(listening, reward), short_forms(bus, creds), allowed)
    where, given = run_and_own_settings(short, settings)
    if show_token:
        print(gateway_token(where) or "this bus asks for no credentials, and the gateway for no token")  # noqa: T201
        return
    log_as(log, "gateway")
    run(partial(serve_actors, where, given))


def _clients(listening: Mapping[str, Any], reward: str | None) -> dict[str, Any]:
    gateway = {name: value for name, value in listening.items() if value is not None}
    return {"actors": {"environment": {"type": "clients", "gateway": gateway, "reward": reward or "posted"}}}
