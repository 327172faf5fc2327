"""Prompts of the recipe `sums`: two numbers up to 12 are added."""

import random
from collections.abc import Iterable
from itertools import product

from launch.recipes.prompt_files import PromptFiles, PromptRow

LARGEST = 12
PROMPT = "What is {a} + {b}? Answer with the number only."


def prompts() -> PromptFiles:
    """Return training prompts, and held-out ones, whose numbers differ by 3, 6 or 9: so each number is held
    out with three others, and no pair is trained on in the other order."""
    pairs = list(product(range(1, LARGEST + 1), range(1, LARGEST + 1)))
    random.Random(0).shuffle(pairs)
    return {
        "prompts": _rows(pair for pair in pairs if not _is_held_out(*pair)),
        "heldout": _rows(pair for pair in pairs if _is_held_out(*pair)),
    }


def _is_held_out(a: int, b: int) -> bool:
    return a != b and (a - b) % 3 == 0


def _rows(pairs: Iterable[tuple[int, int]]) -> list[PromptRow]:
    return [{"prompt": PROMPT.format(a=a, b=b), "label": str(a + b)} for a, b in pairs]
