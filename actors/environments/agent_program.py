"""What an agent's program needs to be there, and what it finds in its environment."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

from actors.settings.agents import POSTED, AgentConfig
from bus.errors import ConfigError
from bus.process.plugins import refuse_of_record

INHERITED = frozenset((
    "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "CURL_CA_BUNDLE", "HIP_VISIBLE_DEVICES", "LANG", "LANGUAGE",
    "LD_LIBRARY_PATH", "LOGNAME", "NO_PROXY", "OMP_NUM_THREADS", "PATH", "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONPATH", "PYTHONPYCACHEPREFIX",
    "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONWARNINGS", "REQUESTS_CA_BUNDLE", "ROCR_VISIBLE_DEVICES", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TZ", "USER", "VIRTUAL_ENV",
))  # fmt: skip
"""Variables of the actor that a program inherits, with those that begin with `LC_`. Others may hold keys."""


def check_program(config: AgentConfig) -> None:
    """Raise `ConfigError` for a program that is not there, or that this host does not allow, and for rewards
    that nobody posts."""
    _refuse_rewards_of_nobody(config)
    for setting, command, _ in commands_of(config):
        refuse_of_record(f"actors.environment.{setting}={command!r}", command, is_program=True)
    for name in config.inherited_variables:
        refuse_of_record(f"actors.environment.inherited_variables={name!r}", name, is_program=True)
    for name, value in config.variables.items():  # some variables decide what the program loads
        refuse_of_record(f"actors.environment.variables.{name}={value!r}", value, is_program=True)
    if missing := [name for name in config.packages if find_spec(name) is None]:
        names = " ".join(missing)
        raise ConfigError(
            f"actors.environment.packages: {config.command!r} needs {names}, which {sys.executable} does not "
            f"have: {sys.executable} -m pip install {names}"
        )
    for setting, command, arguments in commands_of(config):
        if setting != "command" or not config.has_image:
            _check_command(setting, command, arguments)


def commands_of(config: AgentConfig) -> list[tuple[str, str, list[str]]]:
    """Return each command with the name of its setting, as it was given and in words."""
    found = [("command", config.command, config.arguments)]
    if config.verifier is not None:
        found.append(("verifier", config.verifier, config.verifier_arguments))
    return found


def _refuse_rewards_of_nobody(config: AgentConfig) -> None:
    if config.reward != POSTED or config.verifier is not None or config.program_owns_reward:
        return
    raise ConfigError(
        "actors.environment.reward=posted: nobody may post it, since an agent must not pay itself. Name a "
        "reward that the actor computes (--reward exact), or a program that judges what the agent left "
        "(--actors.environment.verifier 'python my_verifier.py'). Where the agent's own program computes it, "
        "and what the policy controls cannot read that program's memory, give "
        "--actors.environment.program-owns-reward: it then reads the label and the address of its reward on "
        "its standard input"
    )


def _check_command(setting: str, command: str, arguments: Sequence[str]) -> None:
    program = arguments[0]
    if shutil.which(program) is None:
        raise ConfigError(f"actors.environment.{setting}: there is no program {program!r}: give its path")
    if (script := _script(arguments)) is not None and not Path(script).is_file():
        raise ConfigError(
            f"actors.environment.{setting}: {command!r} names {script}, which is no file in {Path.cwd()}: "
            "start where it is, or give its whole path"
        )


def _script(arguments: Sequence[str]) -> str | None:
    if not Path(arguments[0]).name.startswith("python"):
        return None
    options = _options(arguments)
    first = "".join(arguments[1 + len(options) : 2 + len(options)])
    return first if first.endswith(".py") and not {"-m", "-c"} & {*options} else None


def _options(arguments: Sequence[str]) -> list[str]:
    return [*takewhile(lambda word: word.startswith("-"), arguments[1:])]


def placed_command(arguments: Sequence[str]) -> list[str]:
    """Return a command as it is run from another directory: with whole paths of files that lie here."""
    return [_placed(word) for word in arguments]


def _placed(word: str) -> str:
    path = Path(word)
    return str(path.absolute()) if not path.is_absolute() and path.is_file() else word


def needed_files(arguments: Sequence[str]) -> tuple[Path, ...]:
    """Return what a program must be able to read: its interpreter, and the files that its command names. What
    lies beside a script may tell the answers, so that it stays covered where the script's place is."""
    found = shutil.which(arguments[0])
    programs = [Path(found).absolute()] if found else []
    places = [path.parent.parent if path.parent.name == "bin" else path for path in programs]
    return (*places, *(Path(word).absolute() for word in arguments[1:] if Path(word).is_file()))


def program_variables(config: AgentConfig, url: str, key: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that asks the gateway at `url` with `key`; `own` tells its task."""
    allowed = INHERITED.union(config.inherited_variables)
    inherited = {
        name: value for name, value in os.environ.items() if name in allowed or name.startswith("LC_")
    }
    near = ",".join(filter(None, [inherited.get("NO_PROXY"), urlsplit(url).hostname]))
    return {
        **inherited,
        **_searched_here(config.arguments, inherited),
        **gateway_variables(config, url, key, near),
        **own,
        **config.variables,
    }


def gateway_variables(config: AgentConfig, url: str, key: str, near: str) -> dict[str, str]:
    """Return the variables by which a program finds the gateway; no proxy brings it to the hosts `near`."""
    return {
        "NO_PROXY": near,
        "no_proxy": near,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "SLUICE_MODEL": config.gateway.model,
    }


def _searched_here(arguments: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which `python -m` finds modules of the directory that the actor is in."""
    options = {*_options(arguments)}
    if not Path(arguments[0]).name.startswith("python") or "-m" not in options or {"-P", "-I"} & options:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), inherited.get("PYTHONPATH")]))}
