"""The environment variables that stand for settings and flags, over configuration files and under flags."""

import os
from collections.abc import Mapping

from bus.config import LOG_FORMAT_VARIABLE, URL_VARIABLE
from bus.security.credentials import VARIABLE as CREDENTIALS_VARIABLE
from launch.settings.sources import Source

RUN_VARIABLE = "SLUICE_RUN"
DIRECTORY_VARIABLE = "SLUICE_DIRECTORY"
SETTING_VARIABLES: Mapping[str, str] = {
    RUN_VARIABLE: "run",
    DIRECTORY_VARIABLE: "directory",
    URL_VARIABLE: "bus.url",
    CREDENTIALS_VARIABLE: "bus.creds",
}
"""Variables by name, each with the setting that it stands for."""
GIVEN_VARIABLES = ("SLUICE_SUPERVISOR", "SLUICE_NODE_RANK", "SLUICE_TASK", "SLUICE_MODEL")
"""Variables that processes give to those that they start, and nobody else sets."""
LOG_LEVEL_VARIABLE = "SLUICE_LOG_LEVEL"
LOG_VARIABLES = (LOG_LEVEL_VARIABLE, LOG_FORMAT_VARIABLE)
DASHBOARD_TOKEN_VARIABLE = "SLUICE_DASHBOARD_TOKEN"
"""Holds the token that `launch dashboard` asks its readers for."""
KNOWN_VARIABLES = (*SETTING_VARIABLES, *LOG_VARIABLES, DASHBOARD_TOKEN_VARIABLE, *GIVEN_VARIABLES)


def variable_of(setting: str) -> str | None:
    return next((name for name, meant in SETTING_VARIABLES.items() if meant == setting), None)


def run_variables() -> list[Source]:
    named = {name: os.environ.get(name) for name in (RUN_VARIABLE, DIRECTORY_VARIABLE)}
    return [
        Source(f"environment {name}", {SETTING_VARIABLES[name]: value})
        for name, value in named.items()
        if value
    ]


def forget_empty_variables() -> None:
    """Take variables without a value out of this process's environment: they count as not set."""
    for name in (*SETTING_VARIABLES, *LOG_VARIABLES, DASHBOARD_TOKEN_VARIABLE):
        if os.environ.get(name) == "":
            del os.environ[name]


def without_setting_variables() -> dict[str, str]:
    """Return the environment for a command whose run is not the one that the variables name."""
    return {name: value for name, value in os.environ.items() if name not in SETTING_VARIABLES}
