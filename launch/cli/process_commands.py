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
    BusUrl,
    ConfigFile,
    LearnerSettings,
    Master,
    NodeRank,
    Nodes,
    PresetName,
    Processes,
    Prompts,
    RewardName,
    Settings,
    ShardsSettings,
    app,
    joining,
    layers_of,
    short_forms,
)
from launch.config import (
    ActorsProcess,
    LearnerProcess,
    ProcessConfig,
    RunConfig,
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
    prompts: Prompts = None,
    reward: RewardName = None,
    settings: Settings = RunConfig(),
) -> None:
    """Train on this machine: bus, storage, learner and actors as supervised processes, with a live view.

    Ctrl-C stops it kindly; the same command takes it up again where it was.

    Parameters
    ----------
    preset_name
        Settings that come with Sluice: sort, addition, load.
    config
        TOML or JSON file of settings, over the preset; flags go over both.
    bus
        NATS server to use, as nats://[user:password@]host:port, instead of starting one.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        A built-in reward, or my_pkg.my_module:function.
    """
    from launch.local.local import run_local

    configure_logging("warning")
    layers = layers_of(preset_name, config, short_forms(bus, prompts, reward), settings)
    own_bus = "url" not in layers.get("bus", {})
    raise SystemExit(run(partial(run_local, resolve(layers), own_bus=own_bus)))


@app.command(name="bus", usage=USAGE.format("bus"))
def bus_command(*, host: str = "127.0.0.1", port: int = 4222, directory: Path = Path("runs/bus")) -> None:
    """Run a nats-server with JetStream on this machine.

    Parameters
    ----------
    host
        Address to listen on; 0.0.0.0 lets other hosts in.
    port
        Port to listen on.
    directory
        Where its streams lie.
    """
    from launch.process.services import serve_bus

    configure_logging()
    run(partial(serve_bus, host, port, directory))


@app.command(usage=USAGE.format("storage"))
def storage(
    *,
    preset_name: PresetName = None,
    config: ConfigFile = None,
    bus: BusUrl = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    settings: Settings = RunConfig(),
) -> None:
    """Dispatch prompts and keep trajectories for one run. It defines the run: the others join by name.

    Parameters
    ----------
    preset_name
        Settings that come with Sluice: sort, addition, load.
    config
        TOML or JSON file of settings, over the preset; flags go over both.
    bus
        NATS server, as nats://[user:password@]host:port.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        A built-in reward, or my_pkg.my_module:function.
    """
    from launch.process.services import serve_storage

    configure_logging()
    layers = layers_of(preset_name, config, short_forms(bus, prompts, reward), settings)
    run(partial(serve_storage, resolve(layers)))


@app.command(usage=USAGE.format("shards"))
def shards(
    *,
    numbers: Annotated[str, Parameter(name="--shards", group=SHORT)],
    bus: BusUrl = None,
    settings: ShardsSettings = ProcessConfig(),
) -> None:
    """Keep some replay shards of a run that `launch storage` leaves out by replay.here: name it with --run.

    Their files lie under --directory of this host. Start as many such processes as you like, on any host.

    Parameters
    ----------
    numbers
        Which: 2, or 0-3, or 0,2-3.
    bus
        NATS server, as nats://[user:password@]host:port.
    """
    from launch.process.services import serve_shards
    from storage.config import shard_numbers

    configure_logging()
    where, own = joining(short_forms(bus), settings)
    run(partial(serve_shards, where, own, shard_numbers(numbers)))


@app.command(usage=USAGE.format("learner"))
def learner(
    *,
    bus: BusUrl = None,
    nproc: Processes = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    shadow: str | None = None,
    from_checkpoint: Path | None = None,
    settings: LearnerSettings = LearnerProcess(),
) -> None:
    """Train the policy of a run whose storage is up: name it with --run. Its settings come from the bus.

    Parameters
    ----------
    bus
        NATS server, as nats://[user:password@]host:port.
    nproc
        Ranks on this host, one for each GPU.
    nodes
        Hosts of the learner; the same command runs on each, with its own --node-rank.
    node_rank
        Which of them this is, from 0.
    master
        Node 0 and a free port there, as host:port.
    shadow
        Be a shadow of this name: train on the steps of the run's learner with settings of your own, and
        change nothing in the run.
    from_checkpoint
        Directory of a checkpoint that the shadow begins from, instead of the initial model.
    """
    from launch.process.services import serve_learner, serve_shadow

    configure_logging()
    given = {"processes": nproc, "nodes": nodes, "node_rank": node_rank, "master": master}
    world = {key: value for key, value in given.items() if value is not None}
    where, own = joining(merge(short_forms(bus), {"learner": {"world": world}} if world else {}), settings)
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
    *, bus: BusUrl = None, reward: RewardName = None, settings: ActorsSettings = ActorsProcess()
) -> None:
    """Roll out prompts for a run: name it with --run. Start as many as you like, on any host.

    Parameters
    ----------
    bus
        NATS server, as nats://[user:password@]host:port.
    reward
        A built-in reward, or my_pkg.my_module:function.
    """
    from launch.process.services import serve_actors

    configure_logging()
    run(partial(serve_actors, *joining(short_forms(bus, reward=reward), settings)))
