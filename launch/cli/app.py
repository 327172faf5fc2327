"""The `launch` application, with what its commands share. Loads no torch, so that help is quick."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import docstring_parser
from cyclopts import App, Group, Parameter
from cyclopts.validators import Number
from pydantic import PlainValidator, ValidationError

from bus.config import LOG_FORMAT_VARIABLE, URL_VARIABLE
from bus.errors import ConfigError
from bus.security.credentials import VARIABLE, load_credentials
from launch.cli.settings_help import show_summary
from launch.process.log_settings import LogFormat, LogLevel, configure_logging
from launch.settings.environment_variables import (
    DIRECTORY_VARIABLE,
    LOG_LEVEL_VARIABLE,
    RUN_VARIABLE,
    run_variables,
)
from launch.settings.run_config import (
    ActorsProcess,
    LearnerProcess,
    ProcessConfig,
    RetrainProcess,
    RunConfig,
    config_file,
    flags,
    merge,
    validate,
)
from launch.settings.short_forms import short_forms
from launch.settings.sources import merged

if TYPE_CHECKING:
    from actors.settings.evaluation import ChatEndpointConfig

# For --help, cyclopts parses the source of every class in every config's ancestry, several times over, though
# pydantic has each field's description already: with the commands' docstrings alone, help is twice as quick.
_parse_docstring = docstring_parser.parse_from_object
docstring_parser.parse_from_object = cache(
    lambda documented: (
        docstring_parser.parse("") if isinstance(documented, type) else _parse_docstring(documented)
    )
)
# It also keeps the line breaks of a command's docstring, which the terminal's width then breaks once more.
_parse_text = docstring_parser.parse


def _parse_paragraphs(
    text: str | None, style: docstring_parser.DocstringStyle = docstring_parser.DocstringStyle.AUTO
) -> docstring_parser.Docstring:
    """Parse a docstring, and make one line of each paragraph of its description."""
    parsed = _parse_text(text, style)
    if parsed.long_description:
        parsed.long_description = re.sub(r"(?<!\n)\n(?=\S)", " ", parsed.long_description)
    return parsed


docstring_parser.parse = _parse_paragraphs
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
AS_WRITTEN = (
    PlainValidator(dict),
    Parameter(name="*", group=Group("Settings", sort_key=1, help_formatter=show_summary)),
)
Settings = Annotated[RunConfig, *AS_WRITTEN]
ShardsSettings = Annotated[ProcessConfig, *AS_WRITTEN]
LearnerSettings = Annotated[LearnerProcess, *AS_WRITTEN]
ActorsSettings = Annotated[ActorsProcess, *AS_WRITTEN]
RetrainSettings = Annotated[RetrainProcess, *AS_WRITTEN]
RunName = Annotated[str, Parameter(name="--run", env_var=RUN_VARIABLE, help="Name of the run.")]
RunsDirectory = Annotated[
    Path, Parameter(name="--directory", env_var=DIRECTORY_VARIABLE, help="Directory of all runs.")
]
AsJson = Annotated[bool, Parameter(name="--json", negative=())]
AsJsonObject = Annotated[AsJson, Parameter(help="Print the result as one JSON object on one line.")]
PresetName = Annotated[
    str | None,
    Parameter(
        name="--preset",
        group=SHORT,
        help="Settings that come with Sluice: sort, addition, count, product, python, retool, repair, "
        "repositories, search, mcp, guess, nim, duel, panel, agent, debate, load.",
    ),
]
RecipeName = Annotated[
    str | None,
    Parameter(
        name="--recipe",
        group=SHORT,
        help="A published model with prompts: sums, calculator, instructions, reasoning, agent.",
    ),
]
ConfigFile = Annotated[Path | None, Parameter(name="--config", group=SHORT)]
ConfigFiles = Annotated[
    list[Path] | None,
    Parameter(
        name="--config", group=SHORT, negative=(), help="Files of settings, TOML or JSON; the last one wins."
    ),
]
BusUrl = Annotated[
    str | None, Parameter(name="--bus", group=SHORT, help="NATS server, as nats://[user:password@]host:port.")
]
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
    Parameter(name="--creds", group=SHORT, help=f"Credentials file for a secured bus. [${VARIABLE}]"),
]
Prompts = Annotated[
    Path | None,
    Parameter(name="--prompts", group=SHORT, help="Training prompts: .jsonl, .parquet or hf://..."),
]
DemonstrationsFile = Annotated[Path | None, Parameter(name="--sft", group=SHORT)]
SourceRun = Annotated[str | None, Parameter(name="--from", group=SHORT)]
PairsFile = Annotated[Path | None, Parameter(name="--pairs", group=SHORT)]
Processes = Annotated[int | None, Parameter(name="--nproc", group=SHORT)]
Nodes = Annotated[int | None, Parameter(name="--nodes", group=SHORT)]
NodeRank = Annotated[int | None, Parameter(name="--node-rank", group=SHORT)]
Master = Annotated[str | None, Parameter(name="--master", group=SHORT)]
StoppedStatus = Annotated[
    int, Parameter(name="--stopped-status", group=SHORT, validator=Number(gte=0, lte=255))
]
PluginsFrom = Annotated[
    list[Path] | None,
    Parameter(
        name="--plugins-from",
        group=SHORT,
        negative=(),
        help="Directory of modules that the run may import on this host, and no others; may be given several "
        "times.",
    ),
]
Insecure = Annotated[bool, Parameter(name="--insecure", group=SHORT, negative=(), show_default=False)]
EnginePython = Annotated[
    Path | None,
    Parameter(
        name="--engine-python",
        group=SHORT,
        help="Interpreter that SGLang's servers run with on this host, whatever the run names.",
    ),
]
RewardName = Annotated[
    str | None,
    Parameter(name="--reward", group=SHORT, help="Built-in reward, or yours: my_pkg.my_module:function."),
]
AgentCommand = Annotated[
    str | None,
    Parameter(name="--agent", group=SHORT, help="Command of a program that is run for each episode."),
]
EnvironmentName = Annotated[
    str | None,
    Parameter(name="--environment", group=SHORT, help="Environment of others, as textarena:Nim-v0."),
]


@dataclass(frozen=True)
class AskedServer:
    """A server that is asked instead of a model of the settings."""

    url: Annotated[
        str | None,
        Parameter(name="--url", group=SHORT, help="Server of OpenAI's API to ask, as http://host/v1."),
    ] = None
    model: Annotated[
        str | None, Parameter(name="--url-model", group=SHORT, help="Name of the model at --url.")
    ] = None
    key_variable: Annotated[
        str | None,
        Parameter(name="--key-variable", group=SHORT, help="Environment variable with the key of --url."),
    ] = None

    def endpoint(self) -> "ChatEndpointConfig | None":
        """Return how it is asked, if one is named. Raises `ConfigError` for a URL or model that is none."""
        from actors.settings.evaluation import ChatEndpointConfig

        given = {"url": self.url, "model": self.model, "key_variable": self.key_variable}
        if not any(given.values()):
            return None
        try:
            return ChatEndpointConfig(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            problems = "; ".join(problem["msg"] for problem in error.errors())
            raise ConfigError(f"--url and --url-model: {problems}") from error


OfServer = Annotated[AskedServer, Parameter(name="*")]
LOOK = Group("Instead of a start", sort_key=2)
PrintConfig = Annotated[
    bool,
    Parameter(
        name="--print-config",
        group=LOOK,
        negative=(),
        show_default=False,
        help="Print every setting with its origin, as a file that --config takes; with --json as JSON.",
    ),
]
AsJsonConfig = Annotated[bool, Parameter(name="--json", group=LOOK, negative=(), show=False)]
DryRun = Annotated[
    bool,
    Parameter(
        name="--dry-run",
        group=LOOK,
        negative=(),
        show_default=False,
        help="Check what a start checks, and start nothing.",
    ),
]
Logging = Annotated["LogOptions", Parameter(name="*")]
GatewayHost = Annotated[str | None, Parameter(name="--host", group=SHORT)]
GatewayPort = Annotated[int | None, Parameter(name="--port", group=SHORT)]
Certificate = Annotated[
    Path | None,
    Parameter(
        name="--certificate", group=SHORT, help="File of the server's certificate with its chain, PEM."
    ),
]
CertificateKey = Annotated[
    Path | None,
    Parameter(name="--certificate-key", group=SHORT, help="File of the certificate's private key, PEM."),
]
ShowToken = Annotated[
    bool,
    Parameter(
        name="--show-token", group=SHORT, negative=(), help="Print the token that is asked for, and end."
    ),
]


def _log_parameter(name: str, variable: str, choices: str) -> Parameter:
    said = f"{choices}. [${variable}]"
    return Parameter(
        name=name, group=SHORT, env_var=variable, help=said, show_env_var=False, show_choices=False
    )


@dataclass(frozen=True)
class LogOptions:
    """How a process, and those that it starts, write their logs."""

    level: Annotated[
        LogLevel | None, _log_parameter("--log-level", LOG_LEVEL_VARIABLE, "debug, info, warning or error")
    ] = None
    form: Annotated[LogFormat | None, _log_parameter("--log-format", LOG_FORMAT_VARIABLE, "text or json")] = (
        None
    )


def log_as(options: LogOptions, process: str, *, level: LogLevel = "info") -> None:
    """Begin the log of a process; `level` counts where the user names none. Its children get the options."""
    chosen = {LOG_LEVEL_VARIABLE: options.level, LOG_FORMAT_VARIABLE: options.form}
    os.environ.update({name: value for name, value in chosen.items() if value is not None})
    configure_logging(options.level or level, options.form or "text", process)


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


READERS = ("watcher", "operator", "storage")
"""Roles that hear and ask all that a screen shows."""


def with_role_of(config: RunConfig, roles: Sequence[str]) -> RunConfig:
    """Return the same settings. Raises `ConfigError` for credentials of a role that is none of these: what
    it may not hear would look as if nobody said it."""
    if (creds := config.bus.creds) is not None and (role := load_credentials(creds).role) not in roles:
        raise ConfigError(
            f"{creds} has the credentials of role {role!r}, which may not do all that this command does: "
            f"name those of {' or '.join(roles)} with --creds"
        )
    return config


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """A run that goes on, as the flags of a command name it and its bus."""

    run_name: RunName = "default"
    bus: RunBusUrl = None
    creds: CredsFile = None
    directory: Annotated[
        RunsDirectory, Parameter(help="Directory of all runs, where the run's config.json may name its bus.")
    ] = Path("runs")

    def config(self, *roles: str) -> RunConfig:
        """Return the settings that say where the run is, with credentials of one of these roles if any is
        named. Raises `ConfigError` as `with_bus_of_run` and `with_role_of` do."""
        named = {"run": self.run_name, "directory": self.directory, **short_forms(self.bus, self.creds)}
        where = validate(with_bus_of_run(named))
        return with_role_of(where, roles) if roles else where

    def live_config(self, *roles: str) -> RunConfig:
        """Return them for a command that asks the run's processes. Raises `ConfigError` if these ended."""
        from launch.run_view.recorded_runs import recorded_runs

        path = self.directory / self.run_name
        if not short_forms(self.bus, self.creds) and (path / "bus").is_dir():  # it ends with the run
            [run] = recorded_runs([path])
            if not run.pids and run.state != "unseen":
                raise ConfigError(
                    f"run {self.run_name!r} in {self.directory} does not go on (it is {run.state}), so no "
                    f"process of it can be asked: `launch runs show --run {self.run_name}` says how it was"
                )
        return self.config(*roles)


OfLiveRun = Annotated[LiveRun, Parameter(name="*")]


def run_and_own_settings(
    short: dict[str, Any], settings: object, *, needs_bus: bool = True
) -> tuple[RunConfig, dict[str, Any]]:
    """Return which run on which bus a process joins, and the settings that it has of its own.

    With `needs_bus` the run's directory may name the bus, as `with_bus_of_run` says."""
    given = merge(merged(run_variables()), short, flags(settings))
    if needs_bus:
        given = with_bus_of_run(given)
    where = {key: given.pop(key) for key in ProcessConfig.model_fields if key in given}
    validate(given)  # a wrong one is refused before the bus is asked for the others
    return validate(where), given
