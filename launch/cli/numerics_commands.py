"""`launch bench on-policy`: compares log-probs of SGLang servers with the learner's."""

from typing import Annotated

from cyclopts import Parameter

from launch.cli.app import ActorsSettings
from launch.cli.bench_commands import AsJson, Model, bench, measure
from launch.cli.bench_server import server_to_measure
from launch.config import ActorsProcess
from launch.process.log_settings import configure_logging


@bench.command(name="on-policy", usage="Usage: launch bench on-policy [OPTIONS]")
def bench_on_policy(
    *,
    model: Model = "tiny",
    modes: Annotated[str | None, Parameter(name="--modes")] = None,
    learners: Annotated[str | None, Parameter(name="--learners")] = None,
    new_tokens: int = 96,
    settings: ActorsSettings = ActorsProcess(),
    as_json: AsJson = False,
) -> None:
    """Compare log-probs of an SGLang server in its modes with the learner's, at equal weights.

    Parameters
    ----------
    model
        Shape of the policy, with random weights: tiny, qwen3-0.6b, qwen3-8b.
    modes
        Modes of the server, with commas: ordinary, deterministic, on-policy. All on a GPU, else the first.
    learners
        Learners, with commas: fsdp, megatron, fsdp-sglang. All on a GPU, else the first two.
    new_tokens
        Number of tokens of each answer.
    as_json
        Print one JSON object on one line.
    """
    from launch.benchmarks.on_policy import Load, usual
    from launch.benchmarks.on_policy import bench_on_policy as measured

    configure_logging("warning")
    engine = server_to_measure(model, settings)
    chosen = usual(_names(modes), _names(learners))
    load = Load(model=model, new_tokens=new_tokens)
    measure(lambda: measured(load, engine, *chosen), as_json=as_json)


def _names(given: str | None) -> tuple[str, ...]:
    return () if given is None else tuple(given.split(","))
