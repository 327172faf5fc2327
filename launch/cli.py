"""`launch ...`: every command, its flags and its help. Loads no torch: help is quick."""

import json
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import docstring_parser
from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError
from pydantic import PlainValidator

from bus.errors import ConfigError, SluiceError
from launch.config import (
    ActorsProcess,
    LearnerProcess,
    ProcessConfig,
    ReplayProcess,
    RunConfig,
    config_file,
    flags,
    merge,
    preset,
    resolve,
    validate,
)
from launch.convert import convert
from launch.ranks import become_rank, is_rank
from launch.runtime import configure_logging, fail, run

# For --help, cyclopts parses the source of every class in every config's ancestry, several times over, though
# pydantic has each field's description already: with the commands' docstrings alone, help is twice as quick.
_parse_docstring = docstring_parser.parse_from_object
docstring_parser.parse_from_object = cache(
    lambda documented: (
        docstring_parser.parse("") if isinstance(documented, type) else _parse_docstring(documented)
    )
)

app = App(
    name="launch",
    help="Asynchronous actor-learner reinforcement learning for language models on a message queue.",
    help_format="plaintext",  # markdown takes 0.1 s to load
    version=lambda: version("sluice-rl"),
    print_error=False,
    exit_on_error=False,
)

app.command(convert)

USAGE = "Usage: launch {} [OPTIONS]"
"""Given, since cyclopts would go through all settings once more for these words."""

SHORT = Group("Short forms", sort_key=0)
# Flags stay as they were written: only together with the layers below them can they be checked.
AS_WRITTEN = PlainValidator(dict), Parameter(name="*", group=Group("Settings", sort_key=1))
Settings = Annotated[RunConfig, *AS_WRITTEN]
ShardsSettings = Annotated[ProcessConfig, *AS_WRITTEN]
LearnerSettings = Annotated[LearnerProcess, *AS_WRITTEN]
ActorsSettings = Annotated[ActorsProcess, *AS_WRITTEN]
ReplaySettings = Annotated[ReplayProcess, *AS_WRITTEN]

PresetName = Annotated[str | None, Parameter(name="--preset", group=SHORT)]
ConfigFile = Annotated[Path | None, Parameter(name="--config", group=SHORT)]
BusUrl = Annotated[str | None, Parameter(name="--bus", group=SHORT)]
Prompts = Annotated[Path | None, Parameter(name="--prompts", group=SHORT)]
Processes = Annotated[int | None, Parameter(name="--nproc", group=SHORT)]
Nodes = Annotated[int | None, Parameter(name="--nodes", group=SHORT)]
NodeRank = Annotated[int | None, Parameter(name="--node-rank", group=SHORT)]
Master = Annotated[str | None, Parameter(name="--master", group=SHORT)]
RewardName = Annotated[str | None, Parameter(name="--reward", group=SHORT)]


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
        Settings that come with Sluice: sort, addition.
    config
        TOML or JSON file of settings, over the preset; flags go over both.
    bus
        NATS server to use, as nats://[user:password@]host:port, instead of starting one.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        A built-in reward, or my_pkg.my_module:function.
    """
    from launch.local import run_local

    configure_logging("warning")
    layers = _layers(preset_name, config, _short(bus, prompts, reward), settings)
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
    from launch.services import serve_bus

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
        Settings that come with Sluice: sort, addition.
    config
        TOML or JSON file of settings, over the preset; flags go over both.
    bus
        NATS server, as nats://[user:password@]host:port.
    prompts
        Training prompts, .jsonl or .parquet.
    reward
        A built-in reward, or my_pkg.my_module:function.
    """
    from launch.services import serve_storage

    configure_logging()
    layers = _layers(preset_name, config, _short(bus, prompts, reward), settings)
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
    from launch.services import serve_shards
    from storage.config import shard_numbers

    configure_logging()
    where, own = _joining(_short(bus), settings)
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
    from launch.services import serve_learner, serve_shadow

    configure_logging()
    given = {"processes": nproc, "nodes": nodes, "node_rank": node_rank, "master": master}
    world = {key: value for key, value in given.items() if value is not None}
    where, own = _joining(merge(_short(bus), {"learner": {"world": world}} if world else {}), settings)
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
        from launch.torchrun import run_world

        raise SystemExit(run_world(several, where.run, ("-m", "launch", *sys.argv[1:])))


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
    from launch.services import serve_actors

    configure_logging()
    run(partial(serve_actors, *_joining(_short(bus, reward=reward), settings)))


@app.command(usage=USAGE.format("replay"))
def replay(
    *,
    from_step: int = 0,
    to_step: int | None = None,
    config: ConfigFile = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    settings: ReplaySettings = ReplayProcess(),
) -> None:
    """Train steps of a run again from its directory: are the batches the same, and the losses?

    With other settings it tells what would have come of the same batches under another objective.

    Parameters
    ----------
    from_step
        Where to start: the newest checkpoint up to it is loaded; 0 is the initial model.
    to_step
        The last step to train; without it, the newest.
    config
        The run's settings, TOML or JSON, where its directory does not hold them.
    as_json
        Print the report as one JSON object on one line.
    """
    from launch.replay import recorded_config, replay_status
    from launch.replay import replay as replay_run
    from storage.run import RunDirectory

    configure_logging("warning" if as_json else "info")
    where, changed = _joining({}, settings)
    run_directory = RunDirectory(where.directory, where.run)
    recorded = recorded_config(run_directory, config)
    report = run(partial(replay_run, run_directory, recorded, changed, (from_step, to_step)))
    print(json.dumps(report, indent=None if as_json else 2))  # noqa: T201 - the user's terminal
    raise SystemExit(replay_status(report))


@app.command(usage=USAGE.format("restore"))
def restore(
    *,
    run_name: Annotated[str, Parameter(name="--run")] = "default",
    directory: Path = Path("runs"),
    archive: str | None = None,
) -> None:
    """Bring back the trajectories that a run's replay has archived. Its storage must be stopped.

    Parameters
    ----------
    run_name
        Name of the run.
    directory
        Where runs lie.
    archive
        Directory or fsspec URL, as the run's replay.archive, which is taken without it.
    """
    from launch.replay import restore_run
    from storage.run import RunDirectory

    try:
        restored = restore_run(RunDirectory(directory, run_name), archive)
    except SluiceError as error:
        fail(error)
    print("\n".join(restored) or "nothing was retired")  # noqa: T201 - the user's terminal


@app.command(usage="Usage: launch data --run NAME --prompts FILE [--keep-old]")
def data(
    *, prompts: Path, run_name: Annotated[str, Parameter(name="--run")] = "default", bus: BusUrl = None,
    keep_old: Annotated[bool, Parameter(name="--keep-old", negative=())] = False,
) -> None:  # fmt: skip
    """Give a run that is going on other prompts, from its next lease on. They stay through restarts.

    Parameters
    ----------
    prompts
        Training prompts, .jsonl or .parquet, with the keys of the run.
    run_name
        Name of the run.
    bus
        NATS server, as nats://[user:password@]host:port.
    keep_old
        Put them after the prompts that there are, instead of in their place.
    """
    from launch.data import add_data

    configure_logging("warning")
    accepted = run(partial(add_data, validate({"run": run_name}, _short(bus)), prompts, keep_old))
    if accepted is not None:
        print(f"{accepted.prompts} prompts, from lease {accepted.first_lease} on")  # noqa: T201 - the user's


@app.command(name="reward", usage="Usage: launch reward [FILE] --run RUN [OPTIONS]")
def reward_command(
    file: Path = Path("-"),
    /,
    *,
    run_name: Annotated[str, Parameter(name="--run")] = "default",
    bus: BusUrl = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Give trajectories that were published without it their reward.

    Each line is an object like {"trajectory_id": "g00000012.3", "reward": 0.5}. Giving one twice is harmless.

    Parameters
    ----------
    file
        JSON Lines; - reads standard input, each line as it comes.
    run_name
        Name of the run.
    bus
        NATS server, as nats://[user:password@]host:port.
    as_json
        Print the account as one JSON object only.
    """
    from launch.rewards import give_rewards

    configure_logging("warning")
    given = run(partial(give_rewards, resolve(_short(bus), {"run": run_name}), file))
    account = {"taken": given.taken, "refused": len(given.refused)}
    said = (
        json.dumps(account) if as_json else f"{given.taken} rewards given, {len(given.refused)} lines refused"
    )
    print(said, flush=True)  # noqa: T201 - the user's terminal
    if given.refused:
        fail(*(ConfigError(refusal) for refusal in given.refused))


@app.command(usage="Usage: launch rescore --run RUN --reward NAME [OPTIONS]")
def rescore(  # noqa: PLR0913 - each is a flag
    *,
    run_name: Annotated[str, Parameter(name="--run")] = "default",
    reward: Annotated[str, Parameter(name="--reward")],
    from_step: int | None = None,
    to_step: int | None = None,
    leases: str | None = None,
    name: str | None = None,
    model: Path | None = None,
    directory: Path = Path("runs"),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Score the stored answers of an interval again with another reward, into a named table; needs no bus.

    Parameters
    ----------
    run_name
        Name of the run.
    reward
        A built-in reward, or my_pkg.my_module:function.
    from_step
        First optimizer step whose groups are scored; without it the run's first.
    to_step
        Last one; without it the run's last.
    leases
        Groups by their leases instead, like 0-255, whether a step trained on them or not.
    name
        Of the table, <run>/scores/<name>.jsonl; without it the reward's.
    model
        Directory with the run's tokenizer; without it that of the run.
    directory
        Where runs lie.
    as_json
        Print the result as one JSON object only.
    """
    from launch.rescore import Interval, parse_leases, run_rescore

    configure_logging("warning")
    if leases is not None and (from_step is not None or to_step is not None):
        raise ConfigError("--leases and steps exclude each other: give one of them")
    interval = Interval(from_step, to_step, parse_leases(leases) if leases is not None else None)
    work = partial(run_rescore, directory, run_name, reward, interval, name=name, model=model)
    result = run(work)
    print(json.dumps(result.to_json()) if as_json else result)  # noqa: T201 - the user's terminal


@app.command(usage=USAGE.format("soak"))
def soak(
    *,
    minutes: float = 15.0,
    seed: int = 0,
    directory: Path = Path("runs/soaks"),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Kill the processes of a real run at random, and account for every trajectory afterwards.

    Parameters
    ----------
    minutes
        How long the harm goes on: at least four kills a minute, longer if need be.
    seed
        Decides what is harmed, and when.
    directory
        Each soak leaves its run in a folder of its own there.
    as_json
        Print the account as one JSON object only.
    """
    from launch.account import exit_status
    from launch.soak import run_soak

    configure_logging("warning" if as_json else "info")
    result = run(partial(run_soak, minutes, seed, directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}"))
    print(json.dumps(result, indent=None if as_json else 2))  # noqa: T201 - the user's terminal
    raise SystemExit(exit_status(result))


@app.command(usage="Usage: launch bench WHAT [OPTIONS]")
def bench(
    what: Literal["actors", "bus", "learner", "replay"],
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure a part on this machine: ratios side by side in one run, with their limits beside them.

    Parameters
    ----------
    what
        actors: the embedded engine against batched generate. bus: publishing against TCP and the C
        client. learner: a training step against a bare megatron-core loop and transformers, on the GPU if
        there is one. replay: writing and reading segments against np.memmap.
    as_json
        Print one JSON object on one line.
    """
    report = _measure(what)
    print(json.dumps(report, indent=None if as_json else 2))  # noqa: T201 - the user's terminal


def _measure(what: str) -> object:
    if what == "bus":
        from bus.bench import bench_bus

        return bench_bus()
    if what == "replay":
        from storage.bench import bench_replay

        return bench_replay()
    if what == "learner":
        from learner.bench import bench_learner

        return bench_learner()
    from actors.engines.bench import bench_embedded

    return bench_embedded()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `launch` command."""
    try:
        app(sys.argv[1:] if arguments is None else arguments)
    except CycloptsError as error:
        fail(ConfigError(_complaint(error)))
    except SluiceError as error:
        fail(error)


def _complaint(error: CycloptsError) -> str:
    """What is wrong with a command line, in the form of our own messages."""
    command, *_ = [*(error.command_chain or ()), ""]
    processes: dict[str, type[ProcessConfig]] = {
        "shards": ProcessConfig,
        "learner": LearnerProcess,
        "actors": ActorsProcess,
    }
    own = processes.get(command)
    if own is not None and isinstance(error, UnknownOptionError):
        option = str(error.token.keyword or error.token.value).partition("=")[0]
        section = option.removeprefix("--").partition(".")[0]
        runs = {*RunConfig.model_fields, "preset", "config", "prompts", "reward"} - {*own.model_fields}
        if section in runs:
            return f"{option} is the run's, not this process's: give it to the `launch storage` of the run"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]!r}: settings are given as --name VALUE"
    said = str(error)
    return said[:1].lower() + said[1:].removesuffix(".")


def _layers(
    preset_name: str | None, config: Path | None, short: dict[str, Any], settings: object
) -> dict[str, Any]:
    """All that was said about a run, merged."""
    return merge(
        preset(preset_name) if preset_name else {},
        config_file(config) if config else {},
        short,
        flags(settings),
    )


def _short(bus: str | None = None, prompts: Path | None = None, reward: str | None = None) -> dict[str, Any]:
    """What the short forms stand for."""
    layer: dict[str, Any] = {}
    if bus is not None:
        layer["bus"] = {"url": bus}
    if prompts is not None:
        layer["data"] = {"prompts": prompts}
    if reward is not None:
        layer["actors"] = {"environment": {"reward": reward}}
    return layer


def _joining(short: dict[str, Any], settings: object) -> tuple[RunConfig, dict[str, Any]]:
    """Which run on which bus, and the settings that this process has of its own."""
    given = merge(short, flags(settings))
    where = {key: given.pop(key) for key in ProcessConfig.model_fields if key in given}
    validate(given)  # a wrong one is refused before the bus is asked for the others
    return validate(where), given
