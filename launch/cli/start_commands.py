"""`launch local` and `launch storage`, which define a run, and what they show instead of starting it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli.app import (
    SHORT,
    USAGE,
    AgentCommand,
    AsJsonConfig,
    AskedServer,
    BusUrl,
    ConfigFiles,
    CredsFile,
    DemonstrationsFile,
    DryRun,
    EnvironmentName,
    Logging,
    LogOptions,
    OfServer,
    PairsFile,
    PresetName,
    PrintConfig,
    Prompts,
    RecipeName,
    RewardName,
    Settings,
    SourceRun,
    app,
    log_as,
)
from launch.external_environments.environment import (
    ExternalEnvironment,
    environment_sources,
    external_environment,
)
from launch.process.runtime import run
from launch.recipes.recipe import Recipe
from launch.recipes.recipe import recipe as recipe_of
from launch.settings.environment_variables import run_variables
from launch.settings.run_config import Layer, RunConfig, resolve, validate
from launch.settings.short_forms import short_sources, sources_of, supervised_sources
from launch.settings.sources import Origins, Source, merged


@app.command(usage=USAGE.format("local"))
def local(  # noqa: PLR0913 - each is a flag
    *,
    preset_name: PresetName = None,
    recipe_name: RecipeName = None,
    config: ConfigFiles = None,
    bus: Annotated[BusUrl, Parameter(help="NATS server, as nats://host:4222; else one is started.")] = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    from_run: SourceRun = None,
    sft: DemonstrationsFile = None,
    pairs: PairsFile = None,
    reward: RewardName = None,
    agent: AgentCommand = None,
    environment: EnvironmentName = None,
    print_config: PrintConfig = False,
    as_json: AsJsonConfig = False,
    dry_run: DryRun = False,
    log: Logging = LogOptions(),
    settings: Settings = RunConfig(),
) -> None:
    """Train on this machine: bus, storage, learner and actors as supervised processes, with a live view.

    Ctrl-C stops the run in order; the same command resumes it.

    Parameters
    ----------
    from_run
        RUN[@STEP]: begin with the weights of that checkpoint.
    sft
        File of demonstrations, which alone are trained on.
    pairs
        File of pairs of answers, on which DPO alone trains.
    """
    log_as(log, "local", level="warning")
    external = None if environment is None else external_environment(environment)
    short = [
        *run_variables(), *environment_sources(external),
        *short_sources(bus, creds, prompts, reward, agent, from_run),
    ]  # fmt: skip
    recipe = None if recipe_name is None else recipe_of(recipe_name)
    sources = start_sources(preset_name, config, short, settings, recipe=recipe)
    # below the flags, which come last
    sources[-1:-1] = supervised_sources(sft, pairs, merged(sources))
    layer = merged(sources)
    resolved = resolve(layer)
    if not print_config:
        prepare(recipe, external)
    own_bus = "url" not in layer.get("bus", {})
    looked = _looked_at(resolved, sources, print_config=print_config, as_json=as_json, dry_run=dry_run)
    if looked == "dry run":
        from launch.checks.start_checks import rehearse_local

        print(run(partial(rehearse_local, resolved, own_bus=own_bus)))  # noqa: T201 - the user's terminal
    if looked:
        return
    from launch.local.local import run_local

    raise SystemExit(run(partial(run_local, resolved, own_bus=own_bus)))


@app.command(name="try", usage=USAGE.format("try"))
def try_(  # noqa: PLR0913 - each is a flag
    *,
    preset_name: PresetName = None,
    recipe_name: RecipeName = None,
    config: ConfigFiles = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    agent: AgentCommand = None,
    environment: EnvironmentName = None,
    count: Annotated[int, Parameter(name="--count", group=SHORT, validator=Number(gte=1))] = 3,
    server: OfServer = AskedServer(),
    log: Logging = LogOptions(),
    settings: Settings = RunConfig(),
) -> None:
    """Show what a model does with a few prompts, untrained.

    It takes the settings of `launch local`, samples with the embedded engine or asks --url, and prints each
    prompt as it is rendered, the answer with the token that ended it, reasoning, tool calls, how many tokens
    are trained, and the reward with its parts.

    Parameters
    ----------
    count
        Number of prompts, from the first.
    """
    from launch.checks.trial import try_model

    log_as(log, "try", level="warning")
    short = short_sources(None, creds, prompts, reward, agent)
    resolved = prepared(preset_name, recipe_name, config, environment, short, settings)
    say = partial(print, flush=True)
    run(partial(try_model, resolved, count=count, say=say, endpoint=server.endpoint()))


@app.command(usage=USAGE.format("storage"))
def storage(  # noqa: PLR0913 - each is a flag
    *,
    preset_name: PresetName = None,
    config: ConfigFiles = None,
    bus: BusUrl = None,
    creds: CredsFile = None,
    prompts: Prompts = None,
    reward: RewardName = None,
    environment: EnvironmentName = None,
    summary: Annotated[bool, Parameter(name="--summary", group=SHORT)] = True,
    print_config: PrintConfig = False,
    as_json: AsJsonConfig = False,
    dry_run: DryRun = False,
    log: Logging = LogOptions(),
    settings: Settings = RunConfig(),
) -> None:
    """Dispatch prompts and keep trajectories for one run. It defines the run, which others join by name.

    Parameters
    ----------
    summary
        Draw curves.png and write summary.json when the learner is done, and when storage ends.
    """
    log_as(log, "storage")
    external = None if environment is None else external_environment(environment)
    short = [*run_variables(), *environment_sources(external), *short_sources(bus, creds, prompts, reward)]
    sources = start_sources(preset_name, config, short, settings)
    resolved = resolve(merged(sources))
    if not print_config:
        prepare(external)
    looked = _looked_at(resolved, sources, print_config=print_config, as_json=as_json, dry_run=dry_run)
    if looked == "dry run":
        from launch.checks.start_checks import rehearse_storage

        print(run(partial(rehearse_storage, resolved)))  # noqa: T201 - the user's terminal
    if looked:
        return
    from launch.services.storage import serve_storage

    run(partial(serve_storage, resolved, summary=summary))


def prepared(
    preset_name: str | None, recipe_name: str | None, config: list[Path] | None, environment: str | None,
    short: Sequence[Source], settings: object,
) -> RunConfig:  # fmt: skip
    """Return the settings of a command that asks a model without a run, once what they need is here."""
    external = None if environment is None else external_environment(environment)
    recipe = None if recipe_name is None else recipe_of(recipe_name)
    above = [*run_variables(), *environment_sources(external), *short]
    resolved = resolve(merged(start_sources(preset_name, config, above, settings, recipe=recipe)))
    prepare(recipe, external)
    return resolved


def prepare(*needed: Recipe | ExternalEnvironment | None) -> None:
    """Make what settings name, such as the model of a recipe."""
    for one in needed:
        if one is not None:
            one.prepare()


def start_sources(
    preset_name: str | None, configs: Sequence[Path] | None, short: Sequence[Source], settings: object,
    *, recipe: Recipe | None = None,
) -> list[Source]:  # fmt: skip
    """Return the settings of a start, and say which of them a later choice of another `type` leaves out."""
    import structlog  # not for help

    of_recipe = None if recipe is None else Source(f"recipe {recipe.name}", recipe.settings)
    sources = sources_of(preset_name, configs, short, settings, recipe=of_recipe)
    below = 1 + sum(one is not None for one in (preset_name, recipe))  # files and flags win over that run
    sources[below:below] = _of_source_run(merged(sources))
    for replaced in Origins(sources).replaced:
        structlog.get_logger().warning("settings_left_out", reason=replaced)
    return sources


def _of_source_run(layer: Layer) -> list[Source]:
    """Return the settings of the model of the run that this one is to begin with, if there is one.

    Raises `ConfigError` for an unknown run or step."""
    if (from_run := layer.get("model", {}).get("from_run")) is None:
        return []
    from launch.run_view.source_run import model_settings

    place = validate(
        {name: layer[name] for name in ("run", "directory") if name in layer},
        {"model": {"from_run": from_run}},
    )
    return [Source(f"run {from_run}", {"model": model_settings(place.directory, place.run, from_run)})]


def _looked_at(
    config: RunConfig, sources: Sequence[Source], *, print_config: bool, as_json: bool, dry_run: bool
) -> Literal["", "settings", "dry run"]:
    """Return what is wanted instead of a start; print the settings if it is those."""
    if print_config and dry_run:
        raise ConfigError("--print-config and --dry-run exclude each other: give one of them")
    if as_json and not print_config:
        raise ConfigError("--json is for --print-config: give both")
    if not print_config:
        return "dry run" if dry_run else ""
    from launch.cli.print_config import printed_json, printed_toml

    print((printed_json if as_json else printed_toml)(config, sources))  # noqa: T201 - the user's terminal
    return "settings"
