"""`launch plan`: what a configuration costs in memory and time on given GPUs, before anything starts."""

import json
from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli.app import SHORT, USAGE, Settings, app
from launch.cli.given_settings import GivenSettings, OfSettings
from launch.process.log_settings import configure_logging
from launch.settings.run_config import RunConfig, validate
from launch.settings.sources import merged
from launch.settings.tree import nearest

Positive = Parameter(group=SHORT, validator=Number(gt=0))


@app.command(usage=USAGE.format("plan"))
def plan(
    *,
    given: OfSettings = GivenSettings(),
    gpus: Annotated[int, Positive] = 1,
    gpu: Annotated[str, Parameter(group=SHORT)] = "h200",
    gpu_memory_gib: Annotated[float | None, Positive] = None,
    prompt_tokens: Annotated[int, Positive] = 256,
    answer_tokens: Annotated[int | None, Positive] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=(), group=SHORT)] = False,
    settings: Settings = RunConfig(),
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
        raise ConfigError(f"--gpu {gpu} is unknown{nearest(gpu, GPUS)}; known are {', '.join(sorted(GPUS))}")
    resolved = validate(merged(given.sources(settings)))
    given.prepare(with_environment=False)
    if given.prompts is not None and not is_hub_data(given.prompts):
        next(read_rows(given.prompts), None)  # a file that is not there is no file to plan with
    kind = GPUS[gpu]
    if gpu_memory_gib is not None:
        kind = replace(kind, memory_gib=gpu_memory_gib)
    limit = resolved.sampling.max_new_tokens
    asked = Question(kind, gpus, prompt_tokens, min(limit, answer_tokens or max(1, limit // 2)))
    found = planned(resolved, run_hf_config(resolved), asked)
    if as_json:
        print(json.dumps(plan_json(found)))  # noqa: T201 - the user's terminal
    else:
        print("\n".join(plan_lines(found, asked)))  # noqa: T201 - the user's terminal
    raise SystemExit(0 if found.fits else 1)
