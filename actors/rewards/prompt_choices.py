"""Checks the rewards that prompts choose, before anything starts."""

from collections.abc import Iterable

from actors.rewards.config import RewardConfig
from actors.rewards.scoring import CHOICE, refused_choice
from bus.errors import ConfigError
from bus.messages import Prompt


def refuse_unknown_choices(prompts: Iterable[Prompt], config: RewardConfig, *, where: str) -> None:
    """Raise `ConfigError` for the first prompt that chooses a reward which the run does not allow.

    Args:
        prompts: of one file, in its order.
        config: names the rewards that are allowed.
        where: the prompts came from, for the error.
    """
    for number, prompt in enumerate(prompts):
        if CHOICE in prompt.metadata and (problem := refused_choice(prompt.metadata[CHOICE], config.names)):
            raise ConfigError(f"{where}, prompt {number}: {problem}")
