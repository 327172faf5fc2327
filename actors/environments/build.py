"""The environment that a configuration names."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from actors.environments.agent import AgentEnvironment
from actors.environments.base import Environment, HandsBackAtStop
from actors.environments.choice import DEFAULT, EnvironmentChoice
from actors.environments.clients import ClientsEnvironment
from actors.environments.debate import Debate
from actors.environments.games.environment import GameEnvironment
from actors.environments.length_profile import LengthProfile
from actors.environments.long_lived_agent import LongLivedAgent
from actors.environments.panel import Panel
from actors.environments.plugin import plugin_environment
from actors.environments.single_turn import SingleTurn
from actors.environments.tools import ToolChat
from actors.programs.hidden import hide
from actors.rewards.base import Closable
from actors.settings.actors import ActorsConfig, EnvironmentConfig, PluginEnvironmentConfig
from actors.settings.agents import AgentConfig
from actors.settings.clients import ClientsConfig
from actors.settings.debate import DebateConfig
from actors.settings.games import GameConfig
from actors.settings.groups import InterruptionConfig
from actors.settings.length_profile import LengthProfileConfig
from actors.settings.panel import PanelConfig
from actors.settings.tool_chat import ToolsConfig


def build_environment(
    config: EnvironmentConfig, *, finish_within_s: float = InterruptionConfig().finish_within_s
) -> Environment:
    """Build it; programs of agents get `finish_within_s` to end after a stop.

    Raises `ConfigError` for a reward or an environment of the user's that cannot be used."""
    if isinstance(config, PluginEnvironmentConfig):
        return plugin_environment(config)
    if isinstance(config, LengthProfileConfig):
        return LengthProfile.from_config(config)
    if isinstance(config, ToolsConfig):
        return ToolChat.from_config(config)
    if isinstance(config, AgentConfig):
        kind = LongLivedAgent if config.long_lived else AgentEnvironment
        return kind.from_config(config, finish_within_s=finish_within_s)
    if isinstance(config, GameConfig):
        return GameEnvironment.from_config(config)
    if isinstance(config, PanelConfig):
        return Panel.from_config(config)
    if isinstance(config, DebateConfig):
        return Debate.from_config(config)
    if isinstance(config, ClientsConfig):
        return ClientsEnvironment.from_config(config)
    return SingleTurn.from_config(config)


@asynccontextmanager
async def built_environment(
    actors: ActorsConfig, stop: asyncio.Event, hidden: Iterable[Path]
) -> AsyncIterator[Environment]:
    """Build the environment of an actor, which is a choice where it has several, and close it at the end.

    `stop` says when the actor is to end. No program of an agent sees the files and directories `hidden`, from
    now on. Raises `ConfigError` as `build_environment` does."""
    hide(hidden)
    async with AsyncExitStack() as opened:
        built: dict[str, Environment] = {}
        for name, config in actors.by_name.items():
            environment = build_environment(config, finish_within_s=actors.interruption.finish_within_s)
            built[name] = environment
            if isinstance(environment, HandsBackAtStop):
                environment.stop_with(stop)
            if isinstance(environment, Closable):
                opened.push_async_callback(environment.close)
        yield EnvironmentChoice(built) if actors.environments else built[DEFAULT]


async def check_environment(actors: ActorsConfig) -> None:
    """Build it, and close it again. Raises `ConfigError` as `build_environment` does."""
    async with built_environment(actors, asyncio.Event(), ()):
        pass
