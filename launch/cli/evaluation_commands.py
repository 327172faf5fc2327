"""`launch eval`, which measures a model on held-out prompts without a run."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli.app import (
    SHORT,
    USAGE,
    AsJson,
    AskedServer,
    Logging,
    LogOptions,
    OfServer,
    Settings,
    app,
    log_as,
)
from launch.cli.given_settings import GivenSettings, OfSettings
from launch.process.runtime import run
from launch.settings.run_config import RunConfig


def _least(name: str, least: int) -> Parameter:
    return Parameter(name=name, group=SHORT, validator=Number(gte=least))


@app.command(name="eval", usage=USAGE.format("eval --out DIRECTORY"))
def evaluate_command(  # noqa: PLR0913 - each is a flag
    *,
    out: Annotated[Path, Parameter(name="--out", group=SHORT)],
    given: OfSettings = GivenSettings(),
    checkpoint: Annotated[Path | None, Parameter(name="--checkpoint", group=SHORT)] = None,
    server: OfServer = AskedServer(),
    samples: Annotated[int, _least("--samples", 1)] = 1,
    count: Annotated[int | None, _least("--count", 1)] = None,
    greedy: Annotated[bool, Parameter(name="--greedy", group=SHORT, negative=())] = False,
    at_once: Annotated[int, _least("--at-once", 1)] = 32,
    as_json: AsJson = False,
    log: Logging = LogOptions(),
    settings: Settings = RunConfig(),
) -> None:
    """Measure a model on held-out prompts without a run: pass@k.

    It takes the settings of `launch local`, and asks a model directory, a checkpoint or a server for answers
    to the held-out prompts and to evaluation.sets. Scores come with intervals of 95 %. Each answer is kept as
    it comes; the same command goes on where it was ended. The exit status is 1 where answers are missing.

    Parameters
    ----------
    out
        Directory of the answers (answers.jsonl) and results (results.json).
    checkpoint
        Checkpoint to measure instead of --model.path, a directory of several, or that of a run.
    samples
        Answers that are sampled to each held-out prompt; evaluation.sets say their own.
    count
        Most prompts of each set, from the first.
    greedy
        Ask for a greedy answer to each prompt, too.
    at_once
        Rollouts that go on at the same time.
    as_json
        Print the results as one JSON object on one line.
    """
    from launch.evaluation.evaluate import EvaluationRequest, evaluate

    endpoint = server.endpoint()
    if endpoint is not None and checkpoint is not None:
        raise ConfigError(f"--url {server.url} with --checkpoint {checkpoint}: give one of them")
    log_as(log, "eval", level="warning")
    resolved = given.prepared(settings)
    request = EvaluationRequest(
        out=out, samples=samples, count=count, greedy=greedy, at_once=at_once,
        checkpoint=checkpoint, endpoint=endpoint,
    )  # fmt: skip
    say = (lambda _: None) if as_json else partial(print, flush=True)
    results = run(lambda stop: evaluate(resolved, stop, request, say))
    if as_json:
        print(json.dumps({"sets": [result.to_json() for result in results]}))  # noqa: T201 - the user's terminal
    raise SystemExit(1 if any(result.missing for result in results) else 0)
