"""Checks the reward that a prompt chooses, and the tests that it brings along, before a run starts."""

from actors.rewards.code.given_tests import BadTestsError, read_tests
from actors.rewards.config import RewardConfig
from actors.rewards.scoring import CHOICE, refused_choice
from bus.messages import Prompt


def refused_reward(prompt: Prompt, config: RewardConfig) -> str | None:
    """Return why the prompt's reward is none that the run allows, or cannot score it, and the remedy; None if
    it can."""
    chosen = prompt.metadata.get(CHOICE, config.reward)
    if CHOICE in prompt.metadata and (problem := refused_choice(chosen, config.names)):
        return problem
    if chosen == "code":
        try:
            read_tests(prompt.metadata, prompt.label)
        except BadTestsError as error:
            return str(error)
    return None
