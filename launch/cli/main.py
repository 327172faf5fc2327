"""`launch ...`: every command, and the error for a wrong one. Loads no torch, so that help is quick."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CycloptsError, Group
from cyclopts.exceptions import (
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from pydantic import create_model
from rich.console import Console

from bus.errors import ConfigError, SluiceError
from launch.cli import (
    completion_script,
    engine_commands,
    key_commands,
    preparation_commands,
    process_commands,
    run_commands,
    slurm_commands,
    start_commands,
    tool_commands,
    trajectory_commands,
    watch_commands,
)
from launch.cli.app import app
from launch.cli.settings_help import show_topic
from launch.process.own_packages import CHECKOUT, CHECKOUT_PACKAGES, find_own_packages_first
from launch.process.runtime import fail, for_user
from launch.settings.environment_variables import (
    DASHBOARD_TOKEN_VARIABLE,
    LOG_VARIABLES,
    SETTING_VARIABLES,
    forget_empty_variables,
)
from launch.settings.run_config import ActorsProcess, LearnerProcess, ProcessConfig, RetrainProcess, RunConfig
from launch.settings.tree import Model

SETTINGS: Mapping[str, Model] = {
    "local": RunConfig,
    "slurm": RunConfig,
    "storage": RunConfig,
    "shards": ProcessConfig,
    "learner": LearnerProcess,
    "actors": ActorsProcess,
    "gateway": ActorsProcess,
    "retrain": RetrainProcess,
    "doctor": RunConfig,
    "plan": RunConfig,
    "try": RunConfig,
    "eval": RunConfig,
}
"""Settings of the commands that have help for single sections."""
OF_CHECKOUT = "Measure and test, in a checkout"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("local", "slurm", "bus", "storage", "shards", "learner", "actors", "gateway"),
    "Prepare": ("init", "doctor", "plan", "try", "eval", "convert", "completion"),
    "Look at a run": ("runs", "status", "watch", "dashboard", "tail"),
    "Act on a run that goes on": ("data", "engines", "keys", "profile", "reward"),
    "Look back": ("verify", "retrain", "witness", "rescore", "restore"),
    OF_CHECKOUT: ("bench", "soak"),
}
"""Commands under the heading that `launch --help` shows them with, the most wanted first."""
COMMANDS = (
    completion_script,
    preparation_commands,
    engine_commands,
    key_commands,
    process_commands,
    run_commands,
    slurm_commands,
    start_commands,
    trajectory_commands,
    tool_commands,
    watch_commands,
)
"""Modules whose import makes their commands known to `app`."""
OPTIONS = Group("Options", sort_key=len(GROUPS))
FURTHER_HELP = f"""\
To begin: `launch local --preset sort` trains a small policy from nothing on this machine, in minutes.
`launch COMMAND --help` describes a command, `launch local --help learner.loss` a section of the settings.
Environment variables count more than configuration files and less than flags:
{", ".join([*SETTING_VARIABLES, *LOG_VARIABLES])}.
{DASHBOARD_TOKEN_VARIABLE} holds the token that `launch dashboard` asks its readers for."""
"""Text under the list of all commands."""


def add_commands_of_checkout() -> None:
    """Add the commands that measure and test, whose code lies in `tests` and is not installed."""
    if all(Path(CHECKOUT, name, "commands").is_dir() for name in CHECKOUT_PACKAGES):
        find_own_packages_first()
        for name in CHECKOUT_PACKAGES:
            import_module(f"{name}.commands")


def group_commands() -> None:
    """Put each command under its heading, in the order of `GROUPS`."""
    known = set(app)
    for position, (heading, names) in enumerate(GROUPS.items()):
        group = Group(heading, sort_key=position)
        for place, name in enumerate(name for name in names if name in known):
            app[name].group = group
            app[name].sort_key = place
            app[name].help_epilogue = ""  # else the epilogue of `launch` itself
    for option in ("--help", "--version"):
        app[option].group = OPTIONS
    app.help_epilogue = FURTHER_HELP


add_commands_of_checkout()
group_commands()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `launch` command."""
    forget_empty_variables()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if (topic := _topic(given)) is not None:
            show_topic(Console(), SETTINGS[given[0]], topic)
            return
        if arguments is None:
            _run_process(given)
        else:
            app(given)
    except CycloptsError as error:
        fail(ConfigError(_complaint(error)))
    except (SluiceError, OSError) as error:
        fail(for_user(error))


def _run_process(arguments: Sequence[str]) -> None:
    """Run the command of a process, whose start would take a third longer with all settings of a run."""
    try:
        with named_settings_alone(arguments):
            app(arguments)
    except CycloptsError:  # the error may name the nearest of all settings
        app(arguments)


@contextmanager
def named_settings_alone(arguments: Sequence[str]) -> Iterator[None]:
    """Have a command take settings of those sections alone that its arguments name, while inside.

    Cyclopts looks at each of six hundred settings several times, whichever are given."""
    if not arguments or arguments[0] not in SETTINGS or {"--help", "-h"} & {*arguments}:
        yield
        return
    root = SETTINGS[arguments[0]]
    names = {argument.removeprefix("--").partition("=")[0].partition(".")[0] for argument in arguments}
    named = {name.replace("-", "_") for name in names}
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in root.model_fields.items() if name in named
    }
    hints = app[arguments[0]].default_command.__annotations__
    every = hints["settings"]
    hints["settings"] = Annotated[create_model(root.__name__, **fields), *every.__metadata__]
    try:
        yield
    finally:
        hints["settings"] = every


def _topic(arguments: Sequence[str]) -> str | None:
    """Return the section of settings whose help a command line asks for, as --help SECTION."""
    if not arguments or arguments[0] not in SETTINGS:
        return None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, _, attached = argument.partition("=")
        if option in ("--help", "-h"):
            return attached or following or None
    return None


def _complaint(error: CycloptsError) -> str:
    """Return what is wrong with a command line, in the form of our own messages."""
    command, *_ = [*(error.command_chain or ()), ""]
    processes: dict[str, type[ProcessConfig]] = {
        "shards": ProcessConfig,
        "learner": LearnerProcess,
        "actors": ActorsProcess,
        "gateway": ActorsProcess,
    }
    own = processes.get(command)
    if own is not None and isinstance(error, UnknownOptionError):
        option = str(error.token.keyword or error.token.value).partition("=")[0]
        section = option.removeprefix("--").partition(".")[0]
        runs = {*RunConfig.model_fields, "preset", "config", "prompts", "reward"} - {*own.model_fields}
        if section in runs:
            return f"{option} is the run's, not this process's: give it to the `launch storage` of the run"
    unknown = (error.unused_tokens or [""])[0] if isinstance(error, UnknownCommandError) else ""
    if unknown == "replay":
        return "there is no command 'replay': `launch retrain` trains the steps of a run again"
    if unknown in GROUPS[OF_CHECKOUT]:
        return f"'launch {unknown}' is not installed: run it in a checkout of Sluice"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]!r}: settings are given as --name VALUE"
    if isinstance(error, RepeatArgumentError) and str(error.token.keyword).startswith("--policies."):
        return f"{error.token.keyword} is given several times: give its values once, with commas between them"
    message = str(error)
    if isinstance(error, UnknownCommandError):  # the message ends with a few commands in no order
        message = f"{message.partition(' Available commands:')[0]} --help lists all"
    return message[:1].lower() + message[1:].removesuffix(".")
