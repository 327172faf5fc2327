"""The environment that a configuration names."""

from actors.config import EnvironmentConfig, PluginEnvironmentConfig
from actors.environments.agent import AgentEnvironment
from actors.environments.agent_config import AgentConfig
from actors.environments.base import Closable, Environment
from actors.environments.length_config import LengthProfileConfig
from actors.environments.length_profile import LengthProfile
from actors.environments.plugin import plugin_environment
from actors.environments.single_turn import SingleTurn
from actors.environments.tools import ToolChat
from actors.environments.tools_config import ToolsConfig


def build_environment(config: EnvironmentConfig) -> Environment:
    """Build it. Raises `ConfigError` for a reward or an environment of the user's that cannot be used."""
    if isinstance(config, PluginEnvironmentConfig):
        return plugin_environment(config)
    if isinstance(config, LengthProfileConfig):
        return LengthProfile.from_config(config)
    if isinstance(config, ToolsConfig):
        return ToolChat.from_config(config)
    if isinstance(config, AgentConfig):
        return AgentEnvironment.from_config(config)
    return SingleTurn.from_config(config)


async def check_environment(config: EnvironmentConfig) -> None:
    """Build it, and close it again. Raises `ConfigError` as `build_environment` does."""
    environment = build_environment(config)
    if isinstance(environment, Closable):
        await environment.close()
