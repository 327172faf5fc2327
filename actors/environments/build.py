"""The environment that a configuration names."""

from actors.config import SingleTurnConfig
from actors.environments.base import Environment
from actors.environments.length_config import LengthProfileConfig
from actors.environments.length_profile import LengthProfile
from actors.environments.single_turn import SingleTurn


def build_environment(config: SingleTurnConfig | LengthProfileConfig) -> Environment:
    """Build it; raises ConfigError for a reward that cannot be loaded."""
    if isinstance(config, LengthProfileConfig):
        return LengthProfile.from_config(config)
    return SingleTurn.from_config(config)
