"""Checks the reward that a prompt chooses, and what it reads of the prompt, before a run starts."""

from collections.abc import Callable, Mapping

from actors.episodes.task import Answer, Task
from actors.rewards.base import RewardError
from actors.rewards.builtin.math_answer import wanted_expression
from actors.rewards.builtin.reasoning_gym import entry_of
from actors.rewards.builtin.registry import REWARDS
from actors.rewards.code.given_tests import BadTestsError, read_tests
from actors.rewards.scoring.answer_scoring import answer_to
from actors.rewards.scoring.scorers import CHOICE, refused_choice
from actors.settings.rewards import RewardConfig
from bus.messages import Prompt

READERS: Mapping[str, Callable[[Answer], object]] = {
    **REWARDS,
    "code": lambda answer: read_tests(answer.metadata, answer.label),
    "deepscaler": wanted_expression,
    "math": wanted_expression,
    "reasoning_gym": entry_of,
}
"""What reads all of a prompt that its reward needs, by the reward's name. Quick rewards do so themselves,
before they look at the answer."""


def chosen_reward(prompt: Prompt, config: RewardConfig) -> str:
    return str(prompt.metadata.get(CHOICE, config.reward))


def refused_reward(prompt: Prompt, config: RewardConfig) -> str | None:
    """Return why the prompt's reward is none that the run allows, or cannot score it, and the remedy; None if
    it can."""
    chosen = chosen_reward(prompt, config)
    if CHOICE in prompt.metadata and (problem := refused_choice(chosen, config.names)):
        return problem
    reader = READERS.get(chosen)
    if reader is None:
        return None
    try:
        reader(answer_of_nobody(prompt, "", task_id="of this prompt"))
    except (RewardError, BadTestsError) as error:
        return str(error)
    return None


def answer_of_nobody(prompt: Prompt, text: str, *, task_id: str) -> Answer:
    return answer_to(Task.of(prompt, task_id), text, "stop", token_count=0)
