"""Prompts of the recipe `sums`: two numbers below 20 are added."""

import random
from collections.abc import Iterable

from launch.recipes.prompt_files import PromptFiles, PromptRow

HELD_OUT = 64
PROMPT = "What is {a} + {b}? Answer with the number only."


def prompts() -> PromptFiles:
    """Return training prompts, and held-out ones, whose pairs are not trained on."""
    pairs = [(a, b) for a in range(1, 20) for b in range(1, 20)]
    random.Random(0).shuffle(pairs)
    return {"prompts": _rows(pairs[HELD_OUT:]), "heldout": _rows(pairs[:HELD_OUT])}


def _rows(pairs: Iterable[tuple[int, int]]) -> list[PromptRow]:
    return [{"prompt": PROMPT.format(a=a, b=b), "label": str(a + b)} for a, b in pairs]
