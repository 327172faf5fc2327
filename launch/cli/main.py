"""`launch ...`: every command, and the error for a wrong one. Loads no torch, so that help is quick."""

import sys
from collections.abc import Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import UnknownCommandError, UnknownOptionError, UnusedCliTokensError

from bus.errors import ConfigError, SluiceError
from launch.cli import (
    bench_commands,
    engine_commands,
    process_commands,
    run_commands,
    status_commands,
    tool_commands,
    watch_commands,
)
from launch.cli.app import app
from launch.config import ActorsProcess, LearnerProcess, ProcessConfig, RunConfig
from launch.process.runtime import fail

COMMANDS = (
    bench_commands,
    engine_commands,
    process_commands,
    run_commands,
    status_commands,
    tool_commands,
    watch_commands,
)
"""Importing them is what makes their commands known to `app`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `launch` command."""
    try:
        app(sys.argv[1:] if arguments is None else arguments)
    except CycloptsError as error:
        fail(ConfigError(_complaint(error)))
    except SluiceError as error:
        fail(error)


def _complaint(error: CycloptsError) -> str:
    """Return what is wrong with a command line, in the form of our own messages."""
    command, *_ = [*(error.command_chain or ()), ""]
    processes: dict[str, type[ProcessConfig]] = {
        "shards": ProcessConfig,
        "learner": LearnerProcess,
        "actors": ActorsProcess,
    }
    own = processes.get(command)
    if own is not None and isinstance(error, UnknownOptionError):
        option = str(error.token.keyword or error.token.value).partition("=")[0]
        section = option.removeprefix("--").partition(".")[0]
        runs = {*RunConfig.model_fields, "preset", "config", "prompts", "reward"} - {*own.model_fields}
        if section in runs:
            return f"{option} is the run's, not this process's: give it to the `launch storage` of the run"
    if isinstance(error, UnknownCommandError) and (error.unused_tokens or [""])[0] == "replay":
        return "there is no command 'replay': `launch retrain` trains the steps of a run again"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]!r}: settings are given as --name VALUE"
    message = str(error)
    return message[:1].lower() + message[1:].removesuffix(".")
