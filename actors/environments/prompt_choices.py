"""Checks the environments, rewards, tools and sandboxes that prompts choose, before a run starts."""

from collections.abc import Iterable

from actors.environments.choice import DEFAULT, chosen_environment, refused_environment
from actors.rewards.scoring.prompt_choices import refused_reward
from actors.settings.actors import ActorsConfig
from actors.settings.rewards import RewardConfig
from actors.tools.prompt_tools import refused_tools
from bus.errors import ConfigError
from bus.messages import Prompt


def refuse_unknown_choices(prompts: Iterable[Prompt], actors: ActorsConfig, *, where: str) -> None:
    """Raise `ConfigError` for the first prompt whose environment, reward, tools or sandbox profile the run
    does not have. In a run with one environment prompts choose none, and may have a field of that name."""
    environments = actors.by_name
    for number, prompt in enumerate(prompts, 1):
        chosen = chosen_environment(prompt.metadata) if actors.environments else DEFAULT
        problem = refused_environment(chosen, environments)
        if problem is None:
            config = environments[str(chosen)]
            problem = refused_tools(prompt.tools, config)
            if problem is None and config.sandboxes is not None:
                problem = config.sandboxes.refused_profile(prompt.metadata)
            if problem is None and isinstance(config, RewardConfig):
                problem = refused_reward(prompt, config)
        if problem is not None:
            raise ConfigError(f"{where}, prompt {number}: {problem}")
