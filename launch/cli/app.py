"""The `launch` application, with what its commands share. Loads no torch, so that help is quick."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
from cyclopts import App, Parameter

from bus.config import LOG_FORMAT_VARIABLE, URL_VARIABLE
from bus.errors import ConfigError
from bus.security.credentials import load_credentials
from launch.cli import options
from launch.process.log_settings import LogLevel, configure_logging
from launch.settings.environment_variables import LOG_LEVEL_VARIABLE, run_variables
from launch.settings.run_config import ProcessConfig, RunConfig, config_file, flags, merge, validate
from launch.settings.short_forms import short_forms
from launch.settings.sources import merged

# For --help, cyclopts parses the source of every class in every config's ancestry, several times over, though
# pydantic has each field's description already: with the commands' docstrings alone, help is twice as quick.
_parse_docstring = docstring_parser.parse_from_object
docstring_parser.parse_from_object = cache(
    lambda documented: (
        docstring_parser.parse("") if isinstance(documented, type) else _parse_docstring(documented)
    )
)
# The parser also keeps the line breaks of a docstring, which the terminal's width then breaks once more.
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


def log_as(log: options.LogOptions, process: str, *, level: LogLevel = "info") -> None:
    """Begin the log of a process; `level` counts where the user names none. Its children get the options."""
    chosen = {LOG_LEVEL_VARIABLE: log.level, LOG_FORMAT_VARIABLE: log.form}
    os.environ.update({name: value for name, value in chosen.items() if value is not None})
    configure_logging(log.level or level, log.form or "text", process)


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

    run_name: options.RunName = "default"
    bus: options.RunBusUrl = None
    creds: options.CredsFile = None
    directory: Annotated[
        options.RunsDirectory,
        Parameter(help="Directory of all runs, where the run's config.json may name its bus."),
    ] = Path("runs")

    def config(self, *roles: str) -> RunConfig:
        """Return the settings that say where the run is, with credentials of one of these roles if any is
        named. Raises `ConfigError` as `with_bus_of_run` and `with_role_of` do."""
        named = {"run": self.run_name, "directory": self.directory, **short_forms(self.bus, self.creds)}
        where = validate(with_bus_of_run(named))
        return with_role_of(where, roles) if roles else where

    def live_config(self, *roles: str) -> RunConfig:
        """Return settings of a command that asks the run's processes. Raises `ConfigError` if these ended."""
        from launch.run_view.recorded_runs import recorded_runs

        path = self.directory / self.run_name
        if not short_forms(self.bus, self.creds) and (path / "bus").is_dir():  # such a bus ends with the run
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
    validate(given)  # a wrong setting is refused before the bus is asked
    return validate(where), given
