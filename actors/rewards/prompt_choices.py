"""Checks the reward that a prompt chooses, before a run starts."""

from actors.rewards.config import RewardConfig
from actors.rewards.scoring import CHOICE, refused_choice
from bus.messages import Prompt


def refused_reward(prompt: Prompt, config: RewardConfig) -> str | None:
    """Return why the prompt's reward is none that the run allows, and the remedy; None if it chooses none or
    one of them."""
    return refused_choice(prompt.metadata[CHOICE], config.names) if CHOICE in prompt.metadata else None
