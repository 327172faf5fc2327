"""Prompts of the recipe `sums`: two numbers up to 12 are added."""

import random
from collections.abc import Iterable
from itertools import product

from launch.recipes.prompt_files import PromptFiles, PromptRow

LARGEST = 12
HELD_OUT = 18
"""Pairs of numbers that are held out, in either order."""
PROMPT = "What is {a} + {b}? Answer with the number only."


def prompts() -> PromptFiles:
    """Return training prompts, and held-out ones, whose numbers are trained on in neither order."""
    pairs = list(product(range(1, LARGEST + 1), range(1, LARGEST + 1)))
    random.Random(0).shuffle(pairs)
    held_out = set(list(dict.fromkeys(map(frozenset, pairs)))[:HELD_OUT])
    return {
        "prompts": _rows(pair for pair in pairs if frozenset(pair) not in held_out),
        "heldout": _rows(pair for pair in pairs if frozenset(pair) in held_out),
    }


def _rows(pairs: Iterable[tuple[int, int]]) -> list[PromptRow]:
    return [{"prompt": PROMPT.format(a=a, b=b), "label": str(a + b)} for a, b in pairs]
