"""A small task on which longer answers are right more often, until they do not end within the limit.

The policy answers a letter with dots. How many are needed is not to be seen: 1 to `MOST_NEEDED`, all as
likely. An answer that has them and ends is right. Only completed answers are scored: one that is cut off is
wrong however many dots it has.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from actors.episodes.task import Answer
from actors.rewards.base import label_of
from bus.codec import Json
from storage.disk.atomic_files import make_directory, write_file

VERSION = 1
"""Version of the task; raise it when the same settings give other prompts or rewards."""
LETTERS = "abcdefgh"
MOST_NEEDED = 6
"""Most dots that an answer may need."""
LIMIT = 10
"""Most tokens of an answer, of which one is its end."""
ENDS = 0.5
"""Probability with which a demonstration ends after each dot."""
PROMPTS, HELD_OUT, DEMONSTRATIONS = 8192, 128, 4096


def score(answer: Answer) -> float:
    """Return 1 for a completed answer with as many dots as its label says, and 0 for any other."""
    completed = answer.finish_reason != "length"
    return float(completed and answer.text.count(".") >= int(label_of(answer)))


class TaskFiles(NamedTuple):
    """Files of the task of one seed."""

    prompts: Path
    heldout: Path
    demonstrations: Path


def write_task(directory: Path, *, seed: int) -> TaskFiles:
    """Write prompts, held-out prompts, and demonstrations whose lengths say nothing of what is needed."""
    make_directory(directory)
    files = TaskFiles(*(directory / f"{part}.jsonl" for part in TaskFiles._fields))
    parts = (
        _prompts(Random(seed), PROMPTS),
        _prompts(Random(f"{seed} held out"), HELD_OUT),
        _demonstrations(Random(f"{seed} demonstrations")),
    )
    for path, rows in zip(files, parts, strict=True):
        write_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return files


def _prompts(draw: Random, count: int) -> Iterator[dict[str, Json]]:
    for _ in range(count):
        yield {"prompt": draw.choice(LETTERS), "label": str(draw.randint(1, MOST_NEEDED))}


def _demonstrations(draw: Random) -> Iterator[dict[str, Json]]:
    for _ in range(DEMONSTRATIONS):
        dots = 1
        while dots < LIMIT - 1 and draw.random() >= ENDS:
            dots += 1
        yield {"prompt": draw.choice(LETTERS), "response": "." * dots}
