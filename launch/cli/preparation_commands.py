"""Commands that prepare a run: `launch init`, `doctor`, `plan` and `eval`."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError, nearest
from launch.cli import options
from launch.cli.app import USAGE, app, log_as
from launch.cli.given_settings import GivenSettings, OfSettings
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.run_config import RunConfig, preset, validate
from launch.settings.sources import merged

STANDARD_OUTPUT = Path("-")


@app.command(usage="Usage: launch init [FILE] [OPTIONS]")
def init(
    file: Annotated[Path, Parameter(allow_leading_hyphen=True)] = Path("sluice.toml"),
    /,
    *,
    preset_name: options.PresetName = None,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
) -> None:
    """Write a configuration file in which every line is explained.

    It has the settings that most runs set. Its lines are comments that show the
    defaults, so that the file as it is changes nothing.

    Parameters
    ----------
    file
        File to write, .toml, which must not exist; - writes to standard output.
    everything
        Write every setting there is.
    """
    from launch.cli.config_template import template

    name = "sluice.toml" if file == STANDARD_OUTPUT else str(file)
    if not name.endswith(".toml"):
        raise ConfigError(f"{name} would be read as JSON or not at all: give it a name that ends with .toml")
    text = template(name, preset(preset_name) if preset_name else {}, everything=everything)
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        with file.open("x") as created:
            created.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already, and is left as it is: name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}: name a file elsewhere") from error
    print(f"wrote {file}: edit it, then `launch local --config {file}`")  # noqa: T201 - the user's terminal


@app.command(usage=USAGE.format("doctor"))
def doctor(
    *,
    given: OfSettings = GivenSettings(),
    bus: options.BusUrl = None,
    creds: options.CredsFile = None,
    as_json: options.AsJson = False,
    settings: options.Settings = RunConfig(),
) -> None:
    """Look whether this host can run what a configuration wants.

    It looks at versions, conflicts of packages, GPU, disk, ports, limits, variables, the model directory, the
    bus with its clock, and at all that a start asks, where prompts are named; it runs no agent. Each
    finding is ok, a warning or an error, and each of the latter two comes with a remedy. It leaves nothing
    but what --recipe and --environment name. The exit status is 1 if there is an error.

    Parameters
    ----------
    as_json
        Print one JSON object on one line: whether it is healthy, and the findings.
    """
    from launch.doctor.checks import examine
    from launch.doctor.findings import worst

    configure_logging("error")
    layer = merged(given.sources(settings, bus=bus, creds=creds))
    resolved = validate(layer)
    given.prepare()
    named = "url" in layer.get("bus", {})
    say = (lambda _: None) if as_json else partial(print, flush=True)
    findings = run(partial(examine, resolved, named, say))
    level = worst(findings)
    if as_json:
        print(json.dumps({"healthy": level != "error", "findings": [one.to_json() for one in findings]}))  # noqa: T201
    raise SystemExit(1 if level == "error" else 0)


Positive = Parameter(group=options.SHORT, validator=Number(gt=0))


@app.command(usage=USAGE.format("plan"))
def plan(  # noqa: PLR0913 - each is a flag
    *,
    given: OfSettings = GivenSettings(),
    gpus: Annotated[int, Positive] = 1,
    gpu: Annotated[str, Parameter(group=options.SHORT)] = "h200",
    gpu_memory_gib: Annotated[float | None, Positive] = None,
    gpu_context_gib: Annotated[float | None, Positive] = None,
    prompt_tokens: Annotated[int, Positive] = 256,
    answer_tokens: Annotated[int | None, Positive] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), group=options.SHORT)] = False,
    settings: options.Settings = RunConfig(),
) -> None:
    """Compute memory and time of a configuration on GPUs.

    It says the memory of a rank and of hosts, seconds of a step, and which side waits. It needs config.json
    of --model.path alone, no weights and no GPU, and fetches the model of --recipe. Where a rank does not
    fit, it names the settings with which one does. The exit status is 1 if the configuration does not fit.

    Parameters
    ----------
    gpus
        Number of GPUs of all hosts: the learner's ranks have one each, and engines the rest.
    gpu
        Kind of GPU: a100, b200, h100, h200 or l40s. Speeds are measured on an H200.
    gpu_memory_gib
        Memory of each GPU, where it is another than that of its kind.
    gpu_context_gib
        What a learner takes of it besides torch's allocator, where you measured it. It is 7.8 of an h200,
        measured, and of an h100; the others are taken to lose the same share, from 2.5 of an l40s on.
    prompt_tokens
        Mean length of a prompt.
    answer_tokens
        Mean length of an answer; without it half of sampling.max_new_tokens.
    as_json
        Print one JSON object on one line: bytes, seconds, tokens.
    """
    from launch.plan.plan import Question, run_hf_config
    from launch.plan.plan import plan as planned
    from launch.plan.report import plan_json, plan_lines
    from learner.metrics.gpus import GPUS
    from storage.prompt_files.hub_data import is_hub_data
    from storage.prompt_files.rows import read_rows

    configure_logging("error")
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is unknown: {nearest(gpu, GPUS)}known are {', '.join(sorted(GPUS))}")
    resolved = validate(merged(given.sources(settings)))
    given.prepare(with_environment=False)
    if given.prompts is not None and not is_hub_data(given.prompts):
        next(read_rows(given.prompts), None)  # a file that is not there is no file to plan with
    kind = GPUS[gpu]
    memory_gib, context_gib = gpu_memory_gib or kind.memory_gib, gpu_context_gib or kind.context_gib
    kind = replace(kind, memory_gib=memory_gib, context_gib=context_gib)
    limit = resolved.sampling.max_new_tokens
    asked = Question(kind, gpus, prompt_tokens, min(limit, answer_tokens or max(1, limit // 2)))
    found = planned(resolved, run_hf_config(resolved), asked)
    print(json.dumps(plan_json(found)) if as_json else "\n".join(plan_lines(found, asked)))  # noqa: T201
    raise SystemExit(0 if found.fits else 1)


def _least(name: str, least: int) -> Parameter:
    return Parameter(name=name, group=options.SHORT, validator=Number(gte=least))


@app.command(name="eval", usage=USAGE.format("eval --out DIRECTORY"))
def evaluate_command(  # noqa: PLR0913 - each is a flag
    *,
    out: Annotated[Path, options.short("--out")],
    given: OfSettings = GivenSettings(),
    checkpoint: Annotated[Path | None, options.short("--checkpoint")] = None,
    server: options.OfServer = options.AskedServer(),
    samples: Annotated[int, _least("--samples", 1)] = 1,
    count: Annotated[int | None, _least("--count", 1)] = None,
    greedy: Annotated[bool, options.short("--greedy", negative=())] = False,
    at_once: Annotated[int, _least("--at-once", 1)] = 32,
    as_json: options.AsJson = False,
    log: options.Logging = options.LogOptions(),
    settings: options.Settings = RunConfig(),
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
