"""`launch doctor`: looks whether this host can run what a configuration wants."""

import json
from functools import partial

from launch.cli.app import (
    USAGE,
    AgentCommand,
    AsJson,
    BusUrl,
    ConfigFiles,
    CredsFile,
    PresetName,
    Prompts,
    RewardName,
    Settings,
    app,
)
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.environment_variables import run_variables
from launch.settings.run_config import RunConfig, validate
from launch.settings.short_forms import short_sources, sources_of
from launch.settings.sources import merged


@app.command(usage=USAGE.format("doctor"))
def doctor(  # noqa: PLR0913 - each is a flag
    *,
    preset_name: PresetName = None,
    config: ConfigFiles = None,
    bus: BusUrl = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    agent: AgentCommand = None,
    as_json: AsJson = False,
    settings: Settings = RunConfig(),
) -> None:
    """Look whether this host can run what a configuration wants.

    It looks at versions, conflicts of packages, GPU, disk, ports, limits, variables, the model directory, the
    bus with its clock, and at all that a start asks, where prompts are named; it runs no agent. Each
    finding is ok, a warning or an error, and each of the latter two comes with a remedy. It leaves nothing.
    The exit status is 1 if there is an error.

    Parameters
    ----------
    as_json
        Print one JSON object on one line: whether it is healthy, and the findings.
    """
    from launch.doctor.checks import examine
    from launch.doctor.findings import worst

    configure_logging("error")
    short = [*run_variables(), *short_sources(bus, creds, prompts, reward, agent)]
    layer = merged(sources_of(preset_name, config, short, settings))
    named = "url" in layer.get("bus", {})
    say = (lambda _: None) if as_json else partial(print, flush=True)
    findings = run(partial(examine, validate(layer), named, say))
    level = worst(findings)
    if as_json:
        print(json.dumps({"healthy": level != "error", "findings": [one.to_json() for one in findings]}))  # noqa: T201
    raise SystemExit(1 if level == "error" else 0)
