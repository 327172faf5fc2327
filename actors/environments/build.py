"""The environment that a configuration names."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from pkgutil import resolve_name

from actors.environments.base import Environment, HandsBackAtStop
from actors.environments.choice import DEFAULT, EnvironmentChoice
from actors.programs.hidden import hide
from actors.rewards.base import Closable
from actors.settings.actors import ActorsConfig
from actors.settings.environment import EnvironmentSettings
from actors.settings.groups import InterruptionConfig


def build_environment(
    config: EnvironmentSettings, *, finish_within_s: float = InterruptionConfig().finish_within_s,
    token: str | None = None,
) -> Environment:  # fmt: skip
    """Build the environment; programs of agents get `finish_within_s` to end after a stop, and clients that
    others start need `token`, if there is one. Raises `ConfigError` for a reward or an environment of the
    user's that cannot be used."""
    options: dict[str, object] = {"finish_within_s": finish_within_s} if config.finishes_after_stop else {}
    if config.takes_leases_on_demand:
        options["token"] = token
    built: Environment = resolve_name(config.built_by)(config, **options)
    return built


@asynccontextmanager
async def built_environment(
    actors: ActorsConfig, stop: asyncio.Event, hidden: Iterable[Path], *, token: str | None = None
) -> AsyncIterator[Environment]:
    """Build the environment of an actor, which is a choice where it has several, and close it at the end.
    `stop` says when the actor is to end; `token` is as `build_environment` takes it. No program of an agent
    sees the files and directories `hidden`, from now on. Raises `ConfigError` as `build_environment` does."""
    hide(hidden)
    async with AsyncExitStack() as opened:
        built: dict[str, Environment] = {}
        for name, config in actors.by_name.items():
            finish_within_s = actors.interruption.finish_within_s
            environment = build_environment(config, finish_within_s=finish_within_s, token=token)
            built[name] = environment
            if isinstance(environment, HandsBackAtStop):
                environment.stop_with(stop)
            if isinstance(environment, Closable):
                opened.push_async_callback(environment.close)
        yield EnvironmentChoice(built) if actors.environments else built[DEFAULT]


async def check_environment(actors: ActorsConfig) -> None:
    """Build the environment, and close it again. Raises `ConfigError` as `build_environment` does."""
    async with built_environment(actors, asyncio.Event(), ()):
        pass
