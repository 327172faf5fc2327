"""Rewards that try a run out, whose curves are known beforehand: one cannot be learnt, the other easily."""

from actors.episodes.draws import uniform_draw
from actors.episodes.task import Answer

HALF_LENGTH = 16
"""Length of an answer to which `length` gives 1/2."""


def random_reward(answer: Answer) -> float:
    """Draw a number in (0, 1) by the name of the rollout, whatever the answer says."""
    return uniform_draw(f"random reward/{answer.task_id}")


def length(answer: Answer) -> float:
    """Prefer short answers: 1 for none, 1/2 for one of 16 tokens.

    Characters stand for tokens where the answer does not tell how many it has."""
    found = answer.token_count or len(answer.text)
    return HALF_LENGTH / (HALF_LENGTH + found)
