"""The options that several commands have, and those of their settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.validators import Number
from pydantic import PlainValidator, ValidationError

from bus.config import LOG_FORMAT_VARIABLE
from bus.errors import ConfigError
from bus.security.credentials import VARIABLE
from launch.cli.settings_help import show_summary
from launch.process.log_settings import LogFormat, LogLevel
from launch.settings.environment_variables import DIRECTORY_VARIABLE, LOG_LEVEL_VARIABLE, RUN_VARIABLE
from launch.settings.run_config import ActorsProcess, LearnerProcess, ProcessConfig, RetrainProcess, RunConfig

if TYPE_CHECKING:
    from actors.settings.evaluation import ChatEndpointConfig

SHORT = Group("Short forms", sort_key=0)
LOOK = Group("Instead of a start", sort_key=2)


def short(name: str, **others: Any) -> Parameter:
    """Return the parameter of a short form of settings."""
    return Parameter(name=name, group=SHORT, **others)


def _look(name: str, **others: Any) -> Parameter:
    return Parameter(name=name, group=LOOK, negative=(), show_default=False, **others)


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
    short(
        "--preset",
        help="Settings that come with Sluice: sort, addition, count, product, python, retool, repair, "
        "repositories, search, mcp, guess, nim, duel, panel, agent, debate, load.",
    ),
]
RecipeName = Annotated[
    str | None,
    short(
        "--recipe", help="A published model with prompts: sums, calculator, instructions, reasoning, agent."
    ),
]
ConfigFile = Annotated[Path | None, short("--config")]
ConfigFiles = Annotated[
    list[Path] | None,
    short("--config", negative=(), help="Files of settings, TOML or JSON; the last one wins."),
]
BusUrl = Annotated[str | None, short("--bus", help="NATS server, as nats://[user:password@]host:port.")]
RunBusUrl = Annotated[
    str | None,
    short(
        "--bus",
        help="NATS server, as nats://[user:password@]host:port; without it, $SLUICE_BUS and --creds, the one "
        "in the run's config.json.",
    ),
]
"""Address of the bus of a command for a run that goes on, whose directory may name it."""
CredsFile = Annotated[
    Path | None, short("--creds", help=f"Credentials file for a secured bus. [${VARIABLE}]")
]
Prompts = Annotated[Path | None, short("--prompts", help="Training prompts: .jsonl, .parquet or hf://...")]
DemonstrationsFile = Annotated[Path | None, short("--sft")]
SourceRun = Annotated[str | None, short("--from")]
PairsFile = Annotated[Path | None, short("--pairs")]
Processes = Annotated[int | None, short("--nproc")]
Nodes = Annotated[int | None, short("--nodes")]
NodeRank = Annotated[int | None, short("--node-rank")]
Master = Annotated[str | None, short("--master")]
StoppedStatus = Annotated[int, short("--stopped-status", validator=Number(gte=0, lte=255))]
PluginsFrom = Annotated[
    list[Path] | None,
    short(
        "--plugins-from",
        negative=(),
        help="Directory of modules that the run may import on this host, and no others; may be given several "
        "times.",
    ),
]
Insecure = Annotated[bool, short("--insecure", negative=(), show_default=False)]
EnginePython = Annotated[
    Path | None,
    short(
        "--engine-python",
        help="Interpreter that SGLang's servers run with on this host, whatever the run names.",
    ),
]
RewardName = Annotated[
    str | None, short("--reward", help="Built-in reward, or yours: my_pkg.my_module:function.")
]
AgentCommand = Annotated[
    str | None, short("--agent", help="Command of a program that is run for each episode.")
]
EnvironmentName = Annotated[
    str | None, short("--environment", help="Environment of others, as textarena:Nim-v0.")
]


@dataclass(frozen=True)
class AskedServer:
    """A server that is asked instead of a model of the settings."""

    url: Annotated[str | None, short("--url", help="Server of OpenAI's API to ask, as http://host/v1.")] = (
        None
    )
    model: Annotated[str | None, short("--url-model", help="Name of the model at --url.")] = None
    key_variable: Annotated[
        str | None, short("--key-variable", help="Environment variable with the key of --url.")
    ] = None

    def endpoint(self) -> "ChatEndpointConfig | None":
        """Return the named server, if one is. Raises `ConfigError` for a URL or model that is none."""
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
PrintConfig = Annotated[
    bool,
    _look(
        "--print-config",
        help="Print every setting with its origin, as a file that --config takes; with --json as JSON.",
    ),
]
AsJsonConfig = Annotated[bool, Parameter(name="--json", group=LOOK, negative=(), show=False)]
DryRun = Annotated[bool, _look("--dry-run", help="Check what a start checks, and start nothing.")]
GatewayHost = Annotated[str | None, short("--host")]
GatewayPort = Annotated[int | None, short("--port")]
Certificate = Annotated[
    Path | None, short("--certificate", help="File of the server's certificate with its chain, PEM.")
]
CertificateKey = Annotated[
    Path | None, short("--certificate-key", help="File of the certificate's private key, PEM.")
]
ShowToken = Annotated[
    bool, short("--show-token", negative=(), help="Print the token that is asked for, and end.")
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


Logging = Annotated[LogOptions, Parameter(name="*")]
