"""`launch local` and `launch storage`, which define a run, and what they show instead of starting it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import USAGE, app, log_as
from launch.cli.given_settings import GivenSettings, OfSettings
from launch.process.runtime import run
from launch.settings.run_config import RunConfig, resolve
from launch.settings.short_forms import supervised_sources
from launch.settings.sources import Source, merged


@app.command(usage=USAGE.format("local"))
def local(  # noqa: PLR0913 - each is a flag
    *,
    given: OfSettings = GivenSettings(),
    bus: Annotated[
        options.BusUrl, Parameter(help="NATS server, as nats://host:4222; else one is started.")
    ] = None,
    creds: options.CredsFile = None,
    from_run: options.SourceRun = None,
    sft: options.DemonstrationsFile = None,
    pairs: options.PairsFile = None,
    print_config: options.PrintConfig = False,
    as_json: options.AsJsonConfig = False,
    dry_run: options.DryRun = False,
    log: options.Logging = options.LogOptions(),
    settings: options.Settings = RunConfig(),
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
    sources = given.sources(settings, bus=bus, creds=creds, from_run=from_run)
    # below the flags, which come last
    sources[-1:-1] = supervised_sources(sft, pairs, merged(sources))
    layer = merged(sources)
    resolved = resolve(layer)
    if not print_config:
        given.prepare()
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
def try_(
    *,
    given: OfSettings = GivenSettings(),
    creds: options.CredsFile = None,
    count: Annotated[int, options.short("--count", validator=Number(gte=1))] = 3,
    page: Annotated[Path | None, options.short("--page")] = None,
    server: options.OfServer = options.AskedServer(),
    log: options.Logging = options.LogOptions(),
    settings: options.Settings = RunConfig(),
) -> None:
    """Show what a model does with a few prompts, untrained.

    It takes the settings of `launch local`, samples with the embedded engine or asks --url, and prints each
    prompt as it is rendered, the answer with the token that ended it, reasoning, tool calls, how many tokens
    are trained, and the reward with its parts.

    Parameters
    ----------
    count
        Number of prompts, from the first.
    page
        File that gets the same as a page of HTML, in which the tokens that are trained are green.
    """
    from launch.checks.trial import shown_on, try_model

    log_as(log, "try", level="warning")
    resolved = given.prepared(settings, creds)
    with shown_on(page) as say:
        run(partial(try_model, resolved, count=count, say=say, endpoint=server.endpoint()))


@app.command(usage=USAGE.format("storage"))
def storage(  # noqa: PLR0913 - each is a flag
    *,
    given: OfSettings = GivenSettings(),
    bus: options.BusUrl = None,
    creds: options.CredsFile = None,
    summary: Annotated[bool, options.short("--summary")] = True,
    print_config: options.PrintConfig = False,
    as_json: options.AsJsonConfig = False,
    dry_run: options.DryRun = False,
    log: options.Logging = options.LogOptions(),
    settings: options.Settings = RunConfig(),
) -> None:
    """Dispatch prompts and keep trajectories for one run. It defines the run, which others join by name.

    Parameters
    ----------
    summary
        Draw curves.png and write summary.json when the learner is done, and when storage ends.
    """
    log_as(log, "storage")
    sources = given.sources(settings, bus=bus, creds=creds)
    resolved = resolve(merged(sources))
    if not print_config:
        given.prepare()
    looked = _looked_at(resolved, sources, print_config=print_config, as_json=as_json, dry_run=dry_run)
    if looked == "dry run":
        from launch.checks.start_checks import rehearse_storage

        print(run(partial(rehearse_storage, resolved)))  # noqa: T201 - the user's terminal
    if looked:
        return
    from launch.services.storage import serve_storage

    run(partial(serve_storage, resolved, summary=summary))


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
