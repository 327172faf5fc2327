"""`launch bench WHAT`: measures a part of the system, or a whole run, on this machine."""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from benchmarks.commands.server import server_to_measure
from bus.errors import ConfigError, SluiceError
from launch.cli import options
from launch.cli.app import app
from launch.process.log_settings import configure_logging
from launch.process.runtime import fail, run
from launch.settings.run_config import ActorsProcess, RunConfig, config_file, flags, merge

if TYPE_CHECKING:
    from benchmarks.overlap import Plan
    from bus.codec import Json

bench = App(name="bench", help="Measure a part on this machine, and its baseline in the same run.")
app.command(bench)
AsJson = Annotated[bool, Parameter(name="--json", negative=())]
Model = Annotated[str, Parameter(name="--model")]
OLDEST_S = 60.0
"""Upper bound on the age of a process that has only imported its modules."""


@bench.command(name="bus", usage="Usage: launch bench bus [--json]")
def bench_bus(*, as_json: AsJson = False) -> None:
    """Compare publishing to the bus with bare TCP and the C client.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.bus import bench_bus as measured

    measure(measured, as_json=as_json)


@bench.command(name="replay", usage="Usage: launch bench replay [--json]")
def bench_replay(*, as_json: AsJson = False) -> None:
    """Compare writing and reading segments with np.memmap, and storing with only receiving; measure leases.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.replay import bench_replay as measured

    measure(measured, as_json=as_json)


@bench.command(name="gateway", usage="Usage: launch bench gateway [--json]")
def bench_gateway(*, as_json: AsJson = False) -> None:
    """Compare a request through the gateway with one to the policy itself, on a scripted engine.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.gateway import bench_gateway as measured

    measure(measured, as_json=as_json)


@bench.command(name="episodes", usage="Usage: launch bench episodes [OPTIONS]")
def bench_episodes(
    *,
    episodes: int = 2000,
    turns: int = 20,
    turn_s: float = 3.0,
    kind: Literal["chat", "gateway", "calculator", "sandbox"] = "chat",
    keep_turns_every_s: float = 60.0,
    as_json: AsJson = False,
) -> None:
    """Run thousands of episodes at once in one actor process, on a scripted engine, and watch its event loop.

    Parameters
    ----------
    episodes
        Episodes that run at once, a multiple of 8.
    turns
        Answers of the policy in each.
    turn_s
        Mean time that the engine takes for an answer.
    kind
        What they do: chat, come through the gateway, call a calculator, or a shell in a sandbox of each.
    keep_turns_every_s
        Time between two moments at which new turns are stored.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.episodes import EpisodesLoad
    from benchmarks.episodes import bench_episodes as measured

    configure_logging("warning")
    load = EpisodesLoad(episodes, turns, turn_s, kind, keep_turns_every_s)
    measure(lambda: {"episodes": measured(load)}, as_json=as_json)


@bench.command(name="sandboxes", usage="Usage: launch bench sandboxes [OPTIONS]")
def bench_sandboxes(*, sandboxes: int = 500, at_once: int = 32, as_json: AsJson = False) -> None:
    """Start sandboxes of episodes and run commands in them, beside bare processes.

    Parameters
    ----------
    sandboxes
        Sandboxes that are started.
    at_once
        Sandboxes at a time.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.sandboxes import bench_sandboxes as measured

    measure(lambda: measured(sandboxes, at_once), as_json=as_json)


@bench.command(name="learner", usage="Usage: launch bench learner [--json]")
def bench_learner(*, as_json: AsJson = False) -> None:
    """Compare a training step with a bare megatron-core loop and transformers, on the GPU if there is one.

    Parameters
    ----------
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.learner import bench_learner as measured

    measure(measured, as_json=as_json)


@bench.command(name="prefix", usage="Usage: launch bench prefix [OPTIONS]")
def bench_prefix(
    *, prompt_tokens: int | None = None, answer_tokens: int | None = None, as_json: AsJson = False
) -> None:
    """Compare training that computes the prompt of 16 siblings once with training that computes it 16 times.

    Parameters
    ----------
    prompt_tokens
        Length of each prompt in tokens: 1024 on CPU, 8192 on CUDA.
    answer_tokens
        Mean length of the answers in tokens: 128 on CPU, 512 on CUDA.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.prefix import bench_prefix as measured
    from benchmarks.prefix import workload_of

    for flag, tokens in (("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if tokens is not None and tokens < 2:
            raise ConfigError(f"{flag} {tokens}: give 2 at least")
    workload = workload_of(prompt_tokens, answer_tokens)
    measure(lambda: measured(workload), as_json=as_json)


@bench.command(name="weights", usage="Usage: launch bench weights [OPTIONS]")
def bench_weights(
    *,
    model: Annotated[str | None, Parameter(name="--model")] = None,
    versions: int = 12,
    ranks: int | None = None,
    settings: options.Settings = RunConfig(),
    as_json: AsJson = False,
) -> None:
    """Measure a publication, from the learner's step to the engine that serves it.

    Settings of the learner and the engine may be given, such as --actors.engine.type sglang,
    --actors.engine.environment.CUDA_VISIBLE_DEVICES 1 or --learner.publication.transport.type files.

    Parameters
    ----------
    model
        Shape of the policy, with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b. Without it the shape
        is small on a CPU, qwen3-0.6b on CUDA.
    versions
        Number of publications that are measured, after two that are not; one in ten has a snapshot.
    ranks
        Ranks of the learner, each on a GPU of its own or all on the CPU. With it they publish to a receiver
        without an engine, and the figures are by rank. --learner.parallel says how they share the model.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.weights import bench_weights as measured
    from benchmarks.weights import settings as settings_of
    from benchmarks.weights import workload_of

    configure_logging("info")
    _refuse_none(versions=versions, ranks=1 if ranks is None else ranks)
    config = settings_of(flags(settings))
    if ranks is not None:
        from benchmarks.weights_ranks import bench_ranks

        measure(lambda: bench_ranks(model, config, ranks=ranks, versions=versions), as_json=as_json)
        return
    measure(lambda: measured(workload_of(model, config), config, versions=versions), as_json=as_json)


@bench.command(name="swarm", usage="Usage: launch bench swarm [OPTIONS]")
def bench_swarm(
    *, receivers: int = 8, size_mb: int = 128, rounds: int = 3, kills: int = 20, as_json: AsJson = False
) -> None:
    """Measure what the learner sends to processes that pass weights on to each other and to others.

    Parameters
    ----------
    receivers
        Number of processes that receive.
    size_mb
        Size of the weights.
    rounds
        Rounds of both, in turns.
    kills
        Processes that are killed at random moments of a last transfer.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.swarm import bench_swarm as measured

    configure_logging("warning")
    values = {"receivers": receivers, "size_mb": size_mb, "rounds": rounds}
    _refuse_none(**values)
    measure(lambda: asyncio.run(measured(**values, kills=kills)), as_json=as_json)


@bench.command(name="scale", usage="Usage: launch bench scale [OPTIONS]")
def bench_scale(
    *, hosts: int = 64, ranks: int = 1, size_mb: int = 2, part_kb: int = 64, link_kb_s: int = 250,
    slower: float = 5.0, versions: int = 2, rounds: int = 3, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure a publication to many hosts with paced links on this one, beside what a cost model says of it.

    Parameters
    ----------
    hosts
        Number of processes that receive, each with a link of its own.
    ranks
        Ranks of the learner, each with a link of its own and its share of the weights.
    size_mb
        Size of the weights.
    part_kb
        Size of a part.
    link_kb_s
        Bandwidth of each link in each direction.
    slower
        Factor by which links and the product's waits are slower than that, so that they take the time and
        not this machine's cores.
    versions
        Versions behind the first one, whose deltas are a fifth of the size or less.
    rounds
        Learners that publish these versions, one after another.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.scale import Scale, predictions
    from benchmarks.scale import bench_scale as measured
    from benchmarks.scale_loops import loop_times

    configure_logging("warning")
    counts = {"hosts": hosts, "ranks": ranks, "size_mb": size_mb, "part_kb": part_kb}
    _refuse_none(**counts, link_kb_s=link_kb_s, rounds=rounds)
    scale = Scale(hosts, ranks, size_mb << 20, part_kb << 10, link_kb_s * 1000, slower)

    def measured_beside() -> dict[str, "Json"]:
        loops = asyncio.run(loop_times(rounds=rounds))
        found = asyncio.run(measured(scale, loops, versions=versions, rounds=rounds))
        return {"loops": dict(loops), "versions": list(found), "predicted": predictions(hosts, loops)}

    measure(measured_beside, as_json=as_json)


@bench.command(name="actors", usage="Usage: launch bench actors [OPTIONS]")
def bench_actors(
    *,
    model: Model = "tiny",
    concurrency: int = 128,
    new_tokens: int = 64,
    rounds: int = 3,
    server_only: Annotated[bool, Parameter(name="--server-only", negative=())] = False,
    settings: options.ActorsSettings = ActorsProcess(),
    as_json: AsJson = False,
) -> None:
    """Compare the embedded engine with batched generate, and an actor with a bare SGLang server.

    Parameters
    ----------
    model
        Shape of the server's model, with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b.
    concurrency
        Requests that the server has at once, a multiple of 8; each eight share a prompt.
    new_tokens
        Number of tokens of each answer.
    rounds
        Measured rounds of each side, in turns, after one that warms up.
    server_only
        Leave the embedded engine out.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.actors import ActorLoad
    from benchmarks.embedded_engine import bench_actors as measured
    from benchmarks.random_models import random_model

    configure_logging("warning")
    engine = server_to_measure(model, settings)
    load = ActorLoad(concurrency=concurrency, new_tokens=new_tokens, rounds=rounds)
    made = partial(random_model, model)
    measure(lambda: measured(engine, made, load, embedded=not server_only), as_json=as_json)


@bench.command(name="actors-scale", usage="Usage: launch bench actors-scale [OPTIONS]")
def bench_actors_scale(
    *,
    actors: int = 10_000,
    window_s: float = 30.0,
    settle_s: float = 90.0,
    rollout_s: float = 60.0,
    as_json: AsJson = False,
) -> None:
    """Measure what many simulated actors cost the bus, storage and a screen, idle and at work.

    Parameters
    ----------
    actors
        Number of actors, each with a connection of its own.
    window_s
        Seconds that are measured, once idle and once at work.
    settle_s
        Seconds before each of them in which the actors find their pace.
    rollout_s
        Mean duration of a rollout, which is a pause.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.many_actors import Load, bench_many_actors

    configure_logging("warning")
    if actors < 1 or not min(window_s, settle_s, rollout_s) > 0:
        raise ConfigError("--actors, --window-s, --settle-s and --rollout-s must be above 0")
    load = Load(actors, window_s, settle_s, rollout_s)
    measure(lambda: bench_many_actors(load), as_json=as_json)


@bench.command(name="overlap", usage="Usage: launch bench overlap [OPTIONS]")
def bench_overlap(
    *,
    model: Model = "tiny",
    learner_device: int | None = None,
    engine_device: int | None = None,
    steps: int = 10,
    rounds: int = 2,
    limit_s: float = inf,
    prompt_tokens: int = 256,
    config: options.ConfigFiles = None,
    settings: options.Settings = RunConfig(),
    as_json: AsJson = False,
) -> None:
    """Measure a run's trajectories per second and waiting times, in asynchronous and synchronous turns.

    Answers have forced, heavy-tailed lengths and random rewards (environment length_profile). All settings of
    a run may be given, such as --actors.engine.type sglang, --admission.groups-per-step 32 or
    --actors.environment.lengths.median 512.

    Parameters
    ----------
    model
        Shape of the policy, with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b.
    learner_device
        GPU of the learner, by its CUDA number.
    engine_device
        GPU of the actors, by its CUDA number.
    steps
        Measured steps of each turn, after some in which the mode settles. Asynchronous steps come in bursts
        of max_staleness + 1, so a multiple of that is fair.
    rounds
        Number of rounds; each is a turn of one mode, then one of the other.
    limit_s
        Seconds from the start of this command until it ends. Measuring ends 12 % or 45 s before, and is
        reported as far as it came; after 95 % the run is killed.
    prompt_tokens
        Length of each prompt in tokens.
    config
        TOML or JSON file of settings; flags override it.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.overlap import WELL
    from benchmarks.overlap import bench_overlap as measured
    from benchmarks.overlap_settings import defaults, make
    from benchmarks.overlap_settings import settings as settings_of

    plan = _overlap_plan(steps, rounds, limit_s)
    configure_logging("info")
    devices = {"learner": learner_device, "actors": engine_device}
    layers = merge(*map(config_file, config or ()), flags(settings))
    directory = Path(layers.get("directory", "runs/overlap")).absolute() / time.strftime("%Y%m%d-%H%M%S")
    below = defaults(model, directory, devices=devices)
    resolved = settings_of(merge(layers, {"directory": directory}), below, model, prompt_tokens=prompt_tokens)
    make(resolved, model, prompt_tokens=prompt_tokens)
    report = run(partial(measured, resolved, plan))
    show(report, as_json=as_json)
    if report["ended"] != WELL:
        fail(SluiceError(str(report["ended"])))


@bench.command(name="critic", usage="Usage: launch bench critic [OPTIONS]")
def bench_critic(
    *,
    directory: Path = Path("runs/critic"),
    seeds: int = 3,
    objectives: tuple[str, ...] = ("reinforce", "gae"),
    steps: int = 100,
    warmup_steps: int = 100,
    lr: float = 5e-4,
    critic_lr: float = 2e-3,
    turns: int = 4,
    parallel: int = 1,
    as_json: AsJson = False,
) -> None:
    """Compare a critic with GAE and REINFORCE, whole runs on a task of turns whose reward comes at the end.

    Parameters
    ----------
    directory
        Place of the runs and their figures. Runs that have ended there are not run again, and one that was
        interrupted goes on.
    seeds
        Number of seeds; each objective has a run of each.
    objectives
        Names of the objectives: reinforce, gae, gae_token, gae_vtrace.
    steps
        Optimizer steps of each run.
    warmup_steps
        Steps on demonstrations before them.
    lr
        Learning rate of every policy.
    critic_lr
        Learning rate of every critic.
    turns
        Answers of an episode, at most 9.
    parallel
        Number of runs at a time; each keeps two processors busy.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.critic import Plan, table
    from benchmarks.critic import bench_critic as measured

    configure_logging("info")
    plan = Plan(directory.absolute(), seeds, objectives, steps, warmup_steps, turns, parallel, lr, critic_lr)
    report = run(partial(measured, plan))
    if as_json:
        show(report, as_json=True)
    else:
        print(table(report))  # noqa: T201 - the user's terminal


def _overlap_plan(steps: int, rounds: int, limit_s: float) -> "Plan":
    """Return the plan, whose time counts from the start of this process, since imports take seconds."""
    import psutil

    from benchmarks.overlap import Plan

    if steps < 1 or rounds < 1:
        raise ConfigError(f"--steps {steps} --rounds {rounds}: measure one step in one round at least")
    if not limit_s > 0:
        raise ConfigError(f"--limit-s {limit_s:g}: give some seconds, or leave it out to measure everything")
    age_s = age_of_process(psutil.Process().create_time(), time.time())
    return Plan(steps, rounds, limit_s, began=time.monotonic() - age_s)


def age_of_process(created_s: float, now_s: float) -> float:
    """Return the seconds since a process was created, at most `OLDEST_S`.

    In a container /proc may tell another machine's time.
    """
    return min(max(now_s - created_s, 0.0), OLDEST_S)


def _refuse_none(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give 1 at least")


def measure(measured: Callable[[], object], *, as_json: bool) -> None:
    """Show what `measured` returns. SIGTERM ends it as Ctrl-C does, which leaves no gigabytes in /tmp."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what is in the background
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    show(measured(), as_json=as_json)


def show(report: object, *, as_json: bool) -> None:
    """Print a report as JSON, on one line or on several."""
    print(json.dumps(report, indent=None if as_json else 2))  # noqa: T201 - the user's terminal
