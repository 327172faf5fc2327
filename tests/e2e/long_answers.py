"""A reward for long answers: random weights give answers of every length, so there is something to learn."""

from actors.episodes.task import Answer

LONGEST = 40


def longer(answer: Answer) -> float:
    """Reward the share of the longest answer."""
    return answer.token_count / LONGEST
