"""`launch.start` and `launch.attach`: a run of this host in the hands of a program or a notebook."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from bus.config import URL_VARIABLE
from launch.api.child import start_local
from launch.api.given import GivenFiles
from launch.api.run import Run
from launch.run_view.recorded_runs import find_run, going_on, supervisor_of
from launch.settings.environment_variables import run_variables, without_setting_variables
from launch.settings.run_config import resolve, validate
from launch.settings.short_forms import short_sources, sources_of
from launch.settings.sources import Source, merged
from storage.disk.atomic_files import write_json
from storage.disk.run_directory import RunDirectory

SETTINGS_FILE = "start.json"
"""File of a run's directory with the settings that a program gave it."""
OUTPUT_FILE = "local.log"
"""File among a run's logs with what `launch local` prints."""


def start(
    preset: str | None = None, *, config: Path | str | Sequence[Path | str] = (),
    prompts: Path | str | Sequence[str | Mapping[str, Any]] | None = None,
    reward: str | Callable[..., Any] | None = None, environment: str | type | None = None,
    agent: str | None = None, **settings: object,
) -> Run:  # fmt: skip
    """Start `launch local` as a process of its own, and return when it has checked its settings.

    The run goes on when this program ends, and `attach` finds it again; `with launch.start(...) as run:`
    stops it at the end of the block. A run that was stopped goes on where it was; of one that is done the
    result is there at once. Settings come from the same places as those of the command: the defaults, then
    `preset`, each file of `config`, the environment variables, and at last what is given here.

    Args:
        preset: settings that come with Sluice, such as "sort".
        config: TOML or JSON files of settings over the preset; the last wins.
        prompts: training prompts: a .jsonl or .parquet file, or the prompts themselves, texts or rows such
            as {"prompt": ..., "label": ...}.
        reward: built-in reward, or your own: a function, or its name as my_pkg.my_module:function.
        environment: class of your own, or its name as my_pkg.my_module:Class. What a cell of a notebook
            defines is written into the run's directory, with the imports, functions and values that it uses.
        agent: command that is run for each episode and asks the policy as it would ask OpenAI's server.
        settings: the run's settings by section, as a file has them: `run="mine"`, `seed=1`,
            `learner={"steps": 20, "optimizer": {"lr": 1e-4}}`.

    Raises `ConfigError` for settings that cannot work, and for a run of this name that goes on already."""
    files = [Path(file) for file in ([config] if isinstance(config, str | Path) else config)]
    sources = sources_of(preset, files, run_variables(), settings)
    place = validate({name: value for name, value in merged(sources).items() if name in ("run", "directory")})
    run = RunDirectory(place.directory.absolute(), place.run)
    path = place.directory.absolute() / place.run  # which is not made before all is checked
    given = GivenFiles(path)
    if prompts is not None and not isinstance(prompts, str | Path):
        prompts = given.prompts(prompts)
    # below what is given by section, which comes last
    sources[-1:-1] = short_sources(
        prompts=None if prompts is None else Path(prompts), agent=agent,
        reward=given.named(reward) if callable(reward) else reward,
    )  # fmt: skip
    if environment is not None:
        named = environment if isinstance(environment, str) else given.named(environment)
        own = {"type": "plugin", "environment": named}
        sources.append(Source("environment", {"actors": {"environment": own}}))
    layer = merged(sources)
    resolve(layer)
    if holder := supervisor_of(path):  # before the run's start.json is written over
        raise going_on(path, holder, "take it by launch.attach")
    settings_file = run.path / SETTINGS_FILE
    url = layer.get("bus", {}).pop("url", None)  # a URL may hold a password: no file or argument has it
    write_json(settings_file, to_jsonable_python(layer))
    variables = without_setting_variables() | ({} if url is None else {URL_VARIABLE: url})
    variables.pop("FORCE_COLOR", None)  # Jupyter sets it, and the output is a file
    if given.write():
        others = filter(None, [variables.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join([str(given.directory), *others])
    process = start_local(("--config", str(settings_file)), variables, run.logs / OUTPUT_FILE)
    process.wait_until_held(run.path / "lock")
    if (failure := process.failure()) is not None:
        raise failure
    return Run(run, process)


def attach(run: str, *, directory: Path | str = "runs") -> Run:
    """Return a run of this host that goes on or has ended, whoever started it.

    Args:
        run: its name.
        directory: that of all runs.

    Raises `ConfigError` with the nearest name when there is no such run."""
    return Run(RunDirectory(find_run(Path(directory).absolute(), run).parent, run))
