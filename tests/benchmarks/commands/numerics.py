"""`launch bench on-policy` and `kv-versions`: compare log-probs that SGLang servers record with others."""

from typing import Annotated

from cyclopts import Parameter

from benchmarks.commands.parts import AsJson, Model, bench, measure
from benchmarks.commands.server import server_to_measure
from bus.errors import ConfigError
from launch.cli import options
from launch.process.log_settings import configure_logging
from launch.settings.run_config import ActorsProcess


@bench.command(name="on-policy", usage="Usage: launch bench on-policy [OPTIONS]")
def bench_on_policy(
    *,
    model: Model = "tiny",
    modes: Annotated[str | None, Parameter(name="--modes")] = None,
    learners: Annotated[str | None, Parameter(name="--learners")] = None,
    new_tokens: int = 96,
    settings: options.ActorsSettings = ActorsProcess(),
    as_json: AsJson = False,
) -> None:
    """Compare log-probs of an SGLang server in its modes with the learner's, at equal weights.

    Parameters
    ----------
    model
        Shape of the policy, with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b.
    modes
        Modes of the server, with commas: ordinary, deterministic, on-policy. All on a GPU, else the first.
    learners
        Learners, with commas: fsdp, megatron, fsdp-sglang. All on a GPU, else the first two.
    new_tokens
        Number of tokens of each answer.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.on_policy import Load, usual
    from benchmarks.on_policy import bench_on_policy as measured

    configure_logging("warning")
    engine = server_to_measure(model, settings)
    chosen = usual(_names(modes), _names(learners))
    load = Load(model=model, new_tokens=new_tokens)
    measure(lambda: measured(load, engine, *chosen), as_json=as_json)


@bench.command(name="kv-versions", usage="Usage: launch bench kv-versions [OPTIONS]")
def bench_kv_versions(
    *,
    model: Model = "tiny",
    modes: Annotated[str, Parameter(name="--modes")] = "no_updates,in_place,retract,drain,group,adapters",
    answers: int = 1000,
    updates: int = 20,
    lr: float = 1e-3,
    settings: options.ActorsSettings = ActorsProcess(),
    as_json: AsJson = False,
) -> None:
    """Compute answers of an SGLang server again with the weights that they name, after many updates.

    Tokens that are not marked as sampled over keys and values of older weights have to agree as well as those
    of a server without any update.

    Parameters
    ----------
    model
        Shape of the policy, with random weights: tiny, qwen3-0.6b, qwen3-4b, qwen3-8b.
    modes
        What is measured, with commas: no_updates, in_place, retract, drain, group, adapters,
        hierarchical_cache, pair.
    answers
        Number of answers in each mode.
    updates
        Number of versions after the first, of which each gets as many answers.
    lr
        What an update adds to each weight or takes from it.
    as_json
        Print one JSON object on one line.
    """
    from benchmarks.kv_versions import Load, refuse_unknown
    from benchmarks.kv_versions import bench_kv_versions as measured

    configure_logging("warning")
    if answers <= updates or updates < 0:
        raise ConfigError(f"--answers {answers} --updates {updates}: give each version an answer at least")
    refuse_unknown(_names(modes))
    engine = server_to_measure(model, settings)
    load = Load(model=model, answers=answers, updates=updates, lr=lr)
    measure(lambda: measured(load, engine, _names(modes)), as_json=as_json)


def _names(given: str | None) -> tuple[str, ...]:
    return () if given is None else tuple(given.split(","))
