"""The `launch` application, with what its commands share. Loads no torch, so that help is quick."""

import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
from cyclopts import App, Group, Parameter
from pydantic import PlainValidator

from bus.config import URL_VARIABLE
from bus.credentials import VARIABLE, load_credentials
from bus.errors import ConfigError
from launch.config import (
    ActorsProcess,
    LearnerProcess,
    ProcessConfig,
    RetrainProcess,
    RunConfig,
    config_file,
    flags,
    merge,
    preset,
    validate,
)

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

USAGE = "Usage: launch {} [OPTIONS]"
"""Usage line of a command. Without it cyclopts would go through all settings once more to make one."""

SHORT = Group("Short forms", sort_key=0)
# Flags stay as they were written: only together with the layers below them can they be checked.
AS_WRITTEN = PlainValidator(dict), Parameter(name="*", group=Group("Settings", sort_key=1))
Settings = Annotated[RunConfig, *AS_WRITTEN]
ShardsSettings = Annotated[ProcessConfig, *AS_WRITTEN]
LearnerSettings = Annotated[LearnerProcess, *AS_WRITTEN]
ActorsSettings = Annotated[ActorsProcess, *AS_WRITTEN]
RetrainSettings = Annotated[RetrainProcess, *AS_WRITTEN]

PresetName = Annotated[str | None, Parameter(name="--preset", group=SHORT)]
ConfigFile = Annotated[Path | None, Parameter(name="--config", group=SHORT)]
BusUrl = Annotated[str | None, Parameter(name="--bus", group=SHORT)]
RunBusUrl = Annotated[
    str | None,
    Parameter(
        name="--bus",
        group=SHORT,
        help="NATS server, as nats://[user:password@]host:port; without it, $SLUICE_BUS and --creds, the one "
        "in the run's config.json.",
    ),
]
"""Address of the bus of a command for a run that goes on, whose directory may name it."""
CredsFile = Annotated[
    Path | None,
    Parameter(
        name="--creds", group=SHORT, help=f"Credentials file for a secured bus; without it ${VARIABLE}."
    ),
]
Prompts = Annotated[Path | None, Parameter(name="--prompts", group=SHORT)]
Processes = Annotated[int | None, Parameter(name="--nproc", group=SHORT)]
Nodes = Annotated[int | None, Parameter(name="--nodes", group=SHORT)]
NodeRank = Annotated[int | None, Parameter(name="--node-rank", group=SHORT)]
Master = Annotated[str | None, Parameter(name="--master", group=SHORT)]
PluginsFrom = Annotated[list[Path] | None, Parameter(name="--plugins-from", group=SHORT, negative=())]
Insecure = Annotated[bool, Parameter(name="--insecure", group=SHORT, negative=())]
EnginePython = Annotated[Path | None, Parameter(name="--engine-python", group=SHORT)]
RewardName = Annotated[str | None, Parameter(name="--reward", group=SHORT)]
AgentCommand = Annotated[str | None, Parameter(name="--agent", group=SHORT)]


def layers_of(
    preset_name: str | None, config: Path | None, short: dict[str, Any], settings: object
) -> dict[str, Any]:
    """Merge the preset, the file, the short forms and the flags of a command line, the last wins."""
    return merge(
        preset(preset_name) if preset_name else {},
        config_file(config) if config else {},
        short,
        flags(settings),
    )


def short_forms(
    bus: str | None = None, creds: Path | None = None, prompts: Path | None = None,
    reward: str | None = None, agent: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the settings that the short forms stand for; a bus that is not named is that of `creds`."""
    layer: dict[str, Any] = {}
    bus = bus or os.environ.get(URL_VARIABLE)
    creds = creds or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if creds is not None:
        layer["bus"] = {"creds": creds.absolute(), "url": bus or load_credentials(creds).url}
    elif bus is not None:
        layer["bus"] = {"url": bus}
    if prompts is not None:
        layer["data"] = {"prompts": prompts}
    environment = {"type": "agent", "command": agent, "reward": "posted"} if agent is not None else {}
    if reward is not None:
        environment["reward"] = reward
    if environment:
        layer["actors"] = {"environment": environment}
    return layer


def allowed_here(
    plugins_from: list[Path] | None, insecure: bool, engine_python: Path | None = None
) -> dict[str, Any]:
    """Return the settings of what this host allows that the short forms stand for."""
    given: dict[str, Any] = {}
    if plugins_from:
        given["plugins_from"] = tuple(plugins_from)
    if insecure:
        given["insecure"] = True
    if engine_python is not None:
        given["engine_python"] = engine_python
    return {"allow": given} if given else {}


def with_bus_of_run(layer: dict[str, Any]) -> dict[str, Any]:
    """Return `layer` with the bus that the config.json of its run names, if it names none itself.

    `launch local` writes that file, and its bus has another port at each start. Raises `ConfigError` for a
    bus whose password the file does not have.
    """
    where = RunConfig.model_fields
    directory = Path(layer.get("directory", where["directory"].default))
    path = directory / str(layer.get("run", where["run"].default)) / "config.json"
    named = layer.get("bus", {})
    if {"url", "creds"} & set(named) or not path.is_file():
        return layer
    recorded = config_file(path).get("bus")
    found = {key: recorded[key] for key in ("url", "creds") if recorded.get(key)} if recorded else {}
    if "***@" in found.get("url", ""):
        raise ConfigError(
            f"the bus that {path} names wants a password, which no file holds: give its URL in {URL_VARIABLE}"
        )
    return merge(layer, {"bus": {**found, **named}})


def run_and_own_settings(short: dict[str, Any], settings: object) -> tuple[RunConfig, dict[str, Any]]:
    """Return which run on which bus a process joins, and the settings that it has of its own."""
    given = merge(short, flags(settings))
    where = {key: given.pop(key) for key in ProcessConfig.model_fields if key in given}
    validate(given)  # a wrong one is refused before the bus is asked for the others
    return validate(where), given
