"""A small task of several turns whose only reward comes at the end: what `launch bench critic` trains on.

In each turn the policy sees how many turns are left, its score so far, and a letter, as in `4ka`, and answers
with one digit. Each letter has one right digit, which scores a point. Every episode opens with a score that
is drawn by luck, and counts for more than all answers. The reward comes at the end: it is the score less the
mean of what luck gives, by turns. No turn has a reward of its own, and no state hides the luck. So a baseline
that does not look at the state leaves all of the luck in the advantages, and one that reads the score none.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from pydantic import Field

from actors.episodes.episode import Episode
from actors.episodes.task import ChatMessage, Task
from actors.policy.policy import Policy
from bus.codec import Json
from bus.config import Config
from storage.disk.atomic_files import make_directory, write_file

RIGHT = {"a": "4", "b": "9", "c": "1", "d": "6", "e": "3", "f": "8", "g": "0", "h": "5"}
"""The right digit of each letter."""
WRONG = {"a": "7", "b": "2", "c": "4", "d": "9", "e": "6", "f": "1", "g": "3", "h": "8"}
"""The digit that demonstrations show as often as the right one, so that no habit of theirs finds it."""
MOST_TURNS = 9
"""Turns that are left are told by one digit."""
LUCK = (0, 5, 10, 15)
"""Scores that an episode may open with, all as likely."""
SCORES = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Character that shows each score, up to 35."""
PROMPTS, HELD_OUT, DEMONSTRATIONS = 4096, 64, 8192


class DelayedReward:
    """Lets a policy answer a row of letters, and rewards it once, at the end.

    Held-out tasks count with the share of right answers, in which there is no luck."""

    trajectories_per_episode: int | None = None

    class Settings(Config):
        """Size of the task."""

        turns: int = Field(MOST_TURNS, ge=1, le=MOST_TURNS)
        """Answers in an episode."""

    def __init__(self, settings: Settings) -> None:
        self._turns = settings.turns

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play one row of letters, which the task's label decides, as the luck of the opening does."""
        policy = policy.fresh(task.task_id)
        opening, letters = episode(task.label or "", self._turns)
        messages: list[ChatMessage] = []
        right = 0
        for number, letter in enumerate(letters):
            messages.append({"role": "user", "content": text(self._turns - number, opening + right, letter)})
            answer = await policy.chat(messages)
            messages.append(answer.message)
            right += answer.text == RIGHT[letter]
        reward = (opening + right - fmean(LUCK)) / self._turns
        return Episode(policy.trajectories(reward), outcome=right / self._turns)


def episode(label: str, turns: int) -> tuple[int, Sequence[str]]:
    """Return the score at the opening of an episode and its letters, the same for the same label."""
    draw = Random(label)
    return draw.choice(LUCK), draw.choices(list(RIGHT), k=turns)


def text(left: int, score: int, letter: str) -> str:
    """Return what the policy sees before an answer."""
    return f"{left}{SCORES[score]}{letter}"


class TaskFiles(NamedTuple):
    """Files of the task of one seed."""

    prompts: Path
    heldout: Path
    demonstrations: Path


def task_files(directory: Path, seed: int) -> TaskFiles:
    """Return where they lie."""
    return TaskFiles(*(directory / f"{part}{seed}.jsonl" for part in TaskFiles._fields))


def write_task(directory: Path, *, turns: int, seed: int) -> None:
    """Write prompts, held-out prompts, and demonstrations half of which are right."""
    make_directory(directory)
    parts = (
        _prompts(f"{seed}", PROMPTS, turns),
        _prompts(f"{seed}-heldout", HELD_OUT, turns),
        _demonstrations(Random(seed), turns),
    )
    for path, rows in zip(task_files(directory, seed), parts, strict=True):
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _prompts(name: str, count: int, turns: int) -> Iterator[dict[str, Json]]:
    for number in range(count):
        opening, letters = episode(label := f"{name}-{number}", turns)
        yield {"prompt": text(turns, opening, letters[0]), "label": label}


def _demonstrations(draw: Random, turns: int) -> Iterator[dict[str, Json]]:
    """Draw chats with one to `turns` answers, of which the last is shown."""
    for number in range(DEMONSTRATIONS):
        chat: list[Json] = []
        score, last = draw.choice(LUCK), number % turns
        for turn, letter in enumerate(draw.choices(list(RIGHT), k=last + 1)):
            chat.append({"role": "user", "content": text(turns - turn, score, letter)})
            answer = draw.choice((RIGHT, WRONG))[letter]
            score += answer == RIGHT[letter]
            if turn == last:
                yield {"prompt": [*chat], "response": answer}
            chat.append({"role": "assistant", "content": answer})
