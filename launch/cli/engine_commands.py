"""`launch engines`: lists, adds and removes the inference servers of a running run."""

import json
from functools import partial
from typing import Annotated, Literal

from cyclopts import App, Parameter

from bus.errors import ConfigError
from launch.cli.app import READERS, LiveRun, OfLiveRun, app
from launch.process.log_settings import configure_logging
from launch.process.runtime import run
from launch.settings.run_config import RunConfig

engines = App(name="engines", help="List, add and remove the inference servers of a running run.")
app.command(engines)
Actor = Annotated[str | None, Parameter(name="--actor")]


@engines.command(name="list", usage="Usage: launch engines list --run RUN")
def list_command(*, live_run: OfLiveRun = LiveRun()) -> None:
    """Print every actor's engines with their state and policy version, as JSON."""
    from launch.operations.live_run import list_engines

    configure_logging("warning")
    found = run(partial(list_engines, live_run.live_config(*READERS)))
    print(json.dumps(found, indent=2, sort_keys=True))  # noqa: T201 - the user's terminal


@engines.command(name="join", usage="Usage: launch engines join URL --run RUN [--actor NAME]")
def join_command(url: str, /, *, live_run: OfLiveRun = LiveRun(), actor: Actor = None) -> None:
    """Add a running SGLang server to an actor; it serves once it has the weights.

    An actor that restarts has forgotten it; name servers that are to stay in actors.engine.urls.

    Parameters
    ----------
    url
        URL of the server, as http://host:port, by which the actor's host reaches it.
    actor
        Name of the actor in `launch engines list`; without it the one with the fewest engines.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no URL of a server: write it as http://host:port")
    _change("join", url, live_run.live_config("operator"), actor)


@engines.command(name="leave", usage="Usage: launch engines leave ENGINE --run RUN [--actor NAME]")
def leave_command(engine: str, /, *, live_run: OfLiveRun = LiveRun(), actor: Actor = None) -> None:
    """Remove an engine from its actor. Its generations go on elsewhere, from their tokens so far.

    Parameters
    ----------
    engine
        Name of the engine in `launch engines list`; for a server that joined this is its URL.
    actor
        Name of the actor, where several have an engine of that name.
    """
    _change("leave", engine, live_run.live_config("operator"), actor)


def _change(action: Literal["join", "leave"], engine: str, where: RunConfig, actor: str | None) -> None:
    from bus.requests import EngineChange
    from launch.operations.live_run import change_engine

    configure_logging("warning")
    chosen = run(partial(change_engine, where, EngineChange(action=action, engine=engine), actor))
    print(f"{engine} {'joined' if action == 'join' else 'left'} {chosen}")  # noqa: T201 - the user's terminal
