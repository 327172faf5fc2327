"""Commands that are the long-running processes of a run."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bus.child_process import module_command
from bus.errors import ConfigError
from launch.cli.app import (
    SHORT,
    USAGE,
    ActorsSettings,
    AgentCommand,
    BusUrl,
    ConfigFile,
    CredsFile,
    EnginePython,
    Insecure,
    LearnerSettings,
    Master,
    NodeRank,
    Nodes,
    PluginsFrom,
    PresetName,
    Processes,
    Prompts,
    RewardName,
    RunBusUrl,
    Settings,
    ShardsSettings,
    allowed_here,
    app,
    layers_of,
    run_and_own_settings,
    short_forms,
    with_bus_of_run,
)
from launch.config import (
    ActorsProcess,
    LearnerProcess,
    MonitoringConfig,
    ProcessConfig,
    RunConfig,
    flags,
    merge,
    resolve,
)
from launch.process.ranks import become_rank, is_rank
from launch.process.runtime import configure_logging, run


@app.command(usage=USAGE.format("local"))
def local(
    *,
    preset_name: PresetName = None,
    config: ConfigFile = None,
    bus: BusUrl = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    agent: AgentCommand = None,
    settings: Settings = RunConfig(),
) -> None:
    """Train on this machine: bus, storage, learner and actors as supervised processes, with a live view.

    Ctrl-C stops the run in order; the same command resumes it.

    Parameters
    ----------
    preset_name
        Settings that come with Sluice: sort, addition, product, load.
    config
        TOML or JSON file of settings, which override the preset; flags override both.
    bus
        NATS server to use, as nats://[user:password@]host:port; without it one is started.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        Name of a built-in reward, or a function of your own as my_pkg.my_module:function.
    agent
        Command of a program that is run for each episode, and asks the policy as it would ask OpenAI's or
        Anthropic's servers. It posts its reward, unless --reward computes it.
    """
    from launch.local.local import run_local

    configure_logging("warning")
    layers = layers_of(preset_name, config, short_forms(bus, creds, prompts, reward, agent), settings)
    own_bus = "url" not in layers.get("bus", {})
    raise SystemExit(run(partial(run_local, resolve(layers), own_bus=own_bus)))


@app.command(name="bus", usage=USAGE.format("bus"))
def bus_command(
    *,
    host: str = "127.0.0.1",
    port: int = 4222,
    directory: Path = Path("runs/bus"),
    insecure: Annotated[bool, Parameter(name="--insecure", negative=())] = False,
    secure: Path | None = None,
    runs: Annotated[list[str] | None, Parameter(name="--run", negative=())] = None,
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
    from launch.process.services import serve_bus

    configure_logging()
    named = tuple(runs or (["default"] if secure is not None else []))
    if named and secure is None:
        raise ConfigError(f"--run {named[0]}: credentials are made for a run with --secure DIR: give both")
    serving = partial(serve_bus, host, port, directory, insecure=insecure, secure=secure, runs=named)
    run(partial(serving, monitoring=monitoring))


@app.command(usage=USAGE.format("storage"))
def storage(
    *,
    preset_name: PresetName = None,
    config: ConfigFile = None,
    bus: BusUrl = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    summary: Annotated[bool, Parameter(name="--summary", group=SHORT)] = True,
    settings: Settings = RunConfig(),
) -> None:
    """Dispatch prompts and keep trajectories for one run. It defines the run, which others join by name.

    Parameters
    ----------
    preset_name
        Settings that come with Sluice: sort, addition, product, load.
    config
        TOML or JSON file of settings, which override the preset; flags override both.
    bus
        NATS server, as nats://[user:password@]host:port.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        Name of a built-in reward, or a function of your own as my_pkg.my_module:function.
    summary
        Draw curves.png and write summary.json when the learner is done, and when storage ends.
    """
    from launch.process.services import serve_storage

    configure_logging()
    layers = layers_of(preset_name, config, short_forms(bus, creds, prompts, reward), settings)
    run(partial(serve_storage, resolve(layers), summary=summary))


@app.command(usage=USAGE.format("shards"))
def shards(
    *,
    numbers: Annotated[str, Parameter(name="--shards", group=SHORT)],
    bus: BusUrl = None,
    creds: CredsFile = None,
    settings: ShardsSettings = ProcessConfig(),
) -> None:
    """Keep those replay shards of a run that its `launch storage` leaves out. The run is named by --run.

    Their files are under --directory of this host. You may start several such processes, on any hosts.

    Parameters
    ----------
    numbers
        Numbers of the shards, such as 2, 0-3 or 0,2-3.
    bus
        NATS server, as nats://[user:password@]host:port.
    """
    from launch.process.services import serve_shards
    from storage.config import shard_numbers

    configure_logging()
    where, own = run_and_own_settings(short_forms(bus, creds), settings)
    run(partial(serve_shards, where, own, shard_numbers(numbers)))


@app.command(usage=USAGE.format("learner"))
def learner(  # noqa: PLR0913 - each is a flag
    *,
    bus: BusUrl = None,
    creds: CredsFile = None,
    nproc: Processes = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    shadow: str | None = None,
    from_checkpoint: Path | None = None,
    plugins_from: PluginsFrom = None,
    insecure: Insecure = False,
    settings: LearnerSettings = LearnerProcess(),
) -> None:
    """Train the policy of the run named by --run, whose storage must run. Its settings come from the bus.

    Parameters
    ----------
    bus
        NATS server, as nats://[user:password@]host:port.
    nproc
        Number of ranks on this host, one for each GPU.
    nodes
        Number of the learner's hosts. The same command runs on each, with its own --node-rank.
    node_rank
        Number of this host, from 0.
    master
        Address of node 0 and a free port there, as host:port.
    shadow
        Name of a shadow, which this learner becomes: it trains on the steps of the run's learner with
        settings of your own, and changes nothing in the run.
    from_checkpoint
        Directory of the checkpoint that the shadow starts from; without it the shadow starts from the initial
        model.
    plugins_from
        Directory of modules that the run may import on this host, and no others; may be given several times.
    insecure
        Import what the run names although everybody who reaches the bus can define a run: for a network that
        is yours alone.
    """
    from launch.process.services import serve_learner, serve_shadow

    configure_logging()
    given = {"processes": nproc, "nodes": nodes, "node_rank": node_rank, "master": master}
    world = {key: value for key, value in given.items() if value is not None}
    where, own = run_and_own_settings(
        merge(
            short_forms(bus, creds),
            allowed_here(plugins_from, insecure),
            {"learner": {"world": world}} if world else {},
        ),
        settings,
    )
    if shadow is not None:
        if world or is_rank():
            raise ConfigError(f"shadow {shadow!r} is one process: it has no ranks, nodes or master")
        run(partial(serve_shadow, where, own, shadow, from_checkpoint))
        return
    if from_checkpoint is not None:
        raise ConfigError("--from-checkpoint is for a --shadow: a learner goes on from its own newest one")
    if is_rank():
        become_rank()
    several = run(partial(serve_learner, where, own, is_rank=is_rank()))
    if several is not None:
        from launch.process.torchrun import run_world

        raise SystemExit(run_world(several, where.run, module_command("launch", *sys.argv[1:])[1:]))


@app.command(usage=USAGE.format("actors"))
def actors(
    *,
    bus: RunBusUrl = None,
    creds: CredsFile = None,
    reward: RewardName = None,
    agent: AgentCommand = None,
    plugins_from: PluginsFrom = None,
    engine_python: EnginePython = None,
    insecure: Insecure = False,
    settings: ActorsSettings = ActorsProcess(),
) -> None:
    """Roll out prompts for the run named by --run. You may start several actors, on any hosts.

    Parameters
    ----------
    reward
        Name of a built-in reward, or a function of your own as my_pkg.my_module:function.
    agent
        Command of a program that is run for each episode, and asks the policy as it would ask OpenAI's or
        Anthropic's servers. It posts its reward, unless --reward computes it.
    plugins_from
        Directory of modules that the run may import on this host, and no others; may be given several times.
    engine_python
        Interpreter that SGLang's servers run with on this host, whatever the run names.
    insecure
        Import and run what the run names although everybody who reaches the bus can define a run: for a
        network that is yours alone.
    """
    from launch.process.services import serve_actors

    configure_logging()
    short = merge(
        short_forms(bus, creds, reward=reward, agent=agent),
        allowed_here(plugins_from, insecure, engine_python),
    )
    given = with_bus_of_run(merge(short, flags(settings)))
    run(partial(serve_actors, *run_and_own_settings(given, {})))
